"""A reward that is computed by an HTTP server, here examples/reward_server.py:

    python examples/reward_server.py 8009
    export REWARD_URL=http://localhost:8009
    python rloo.py --rewards examples/remote_reward.py:remote

Requests run concurrently, also with other `async def` rewards. Errors that may be temporary (no connection,
status 429 or 5xx) are retried with exponential backoff; other errors end the run with the server's reply.
"""

import asyncio
import base64
import io
import os

import httpx

BATCH_SIZE = 64  # responses per request
MAX_ATTEMPTS = 6  # with waits of 1, 2, 4, 8 and 16 s in between


def encode_images(chat: list[dict]) -> list[str]:
    """The images of a chat as base64-encoded PNG files."""
    files = []
    for part in (part for message in chat for part in message["content"] if part["type"] == "image"):
        buffer = io.BytesIO()
        part["image"].save(buffer, "PNG")
        files.append(base64.b64encode(buffer.getvalue()).decode())
    return files


async def request_rewards(client: httpx.AsyncClient, body: dict) -> list[float | None]:
    url = os.environ.get("REWARD_URL", "http://localhost:8009")
    for attempt in range(MAX_ATTEMPTS):
        await asyncio.sleep(2 ** (attempt - 1) if attempt else 0)
        try:
            reply = await client.post(url, json=body)
        except httpx.TransportError as error:
            problem = repr(error)
            continue
        problem = f"status {reply.status_code}, {reply.text[:200]}"
        if reply.is_success:
            return reply.json()["rewards"]
        if reply.status_code != 429 and reply.status_code < 500:
            raise RuntimeError(f"reward server: {problem}")
    raise RuntimeError(f"the reward server failed {MAX_ATTEMPTS} times: {problem}")


async def remote(prompts: list, texts: list, answer: list, chats: list, log_metric, **columns) -> list:
    body = {"prompts": prompts, "responses": texts, "references": answer}
    body["images"] = [encode_images(chat) for chat in chats]
    starts = range(0, len(texts), BATCH_SIZE)
    batches = [{name: values[i : i + BATCH_SIZE] for name, values in body.items()} for i in starts]
    async with httpx.AsyncClient(timeout=60) as client:
        rewards = await asyncio.gather(*(request_rewards(client, batch) for batch in batches))
    log_metric("remote_requests", len(batches))
    return sum(rewards, [])
