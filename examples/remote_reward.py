"""A reward that another process computes, here examples/reward_server.py:

    python examples/reward_server.py 8009
    export REWARD_URL=http://localhost:8009
    python rloo.py --rewards examples/remote_reward.py:remote --reward-weights 1

Requests run side by side, and beside other `async def` rewards. What may pass (no connection, status 429 or
5xx) is tried again with longer and longer waits; what can't be mended ends the run with the server's answer.
"""

import asyncio
import base64
import io
import os

import httpx

BATCH, TRIES = 64, 6  # responses in a request; waits of 1, 2, 4, 8, 16 s in between


def picture_files(chat: list[dict]) -> list[str]:
    files = []
    for part in (part for message in chat for part in message["content"] if part["type"] == "image"):
        part["image"].save(buffer := io.BytesIO(), "PNG")
        files.append(base64.b64encode(buffer.getvalue()).decode())
    return files


async def ask(client: httpx.AsyncClient, body: dict) -> list[float | None]:
    for attempt in range(TRIES):
        await asyncio.sleep(2 ** (attempt - 1) if attempt else 0)
        try:
            answer = await client.post(os.environ.get("REWARD_URL", "http://localhost:8009"), json=body)
            if answer.status_code != 429 and answer.status_code < 500:
                if answer.is_error:
                    raise RuntimeError(f"reward server: status {answer.status_code}, {answer.text[:200]}")
                return answer.json()["rewards"]
            problem = f"status {answer.status_code}, {answer.text[:200]}"
        except httpx.TransportError as error:
            problem = repr(error)
    raise RuntimeError(f"the reward server gave no answer in {TRIES} tries: {problem}")


async def remote(prompts: list, texts: list, answer: list, chats: list, log_metric, **columns) -> list:
    body = {"prompts": prompts, "responses": texts, "references": answer}
    body["images"] = [picture_files(chat) for chat in chats]
    starts = range(0, len(texts), BATCH)
    async with httpx.AsyncClient(timeout=60) as client:
        parts = [{name: values[i : i + BATCH] for name, values in body.items()} for i in starts]
        rewards = await asyncio.gather(*(ask(client, part) for part in parts))
    log_metric("reward/remote_requests", len(parts))
    return sum(rewards, [])
