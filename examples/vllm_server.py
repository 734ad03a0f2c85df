"""vLLM's own OpenAI servers as the sampler, on other GPUs or other machines:

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --logprobs-mode processed_logprobs --port 8000      # one or more
    VLLM_URLS=http://localhost:8000 python rloo.py --model MODEL --rollout examples/vllm_server.py:Servers

They read new weights from the run's folder, so they must see --output-dir. A sampler is any class with
sync(), which takes over the model's weights, and sample(): prompts (common/packing.py) -> num_samples
responses to each. The rloo below is a second copy of the running script: it gives functions only.
"""

import base64
import io
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).resolve().parent.parent))
from common.packing import Prompt, Response, media_token_ids
from rloo import fail, merged_weights


class Servers:
    def __init__(self, args, model, end_ids: list[int], run_dir: Path):
        import httpx

        self.args = args
        self.model = model
        self.end_ids = end_ids
        self.folder = run_dir.resolve() / "server_weights"
        self.client = httpx.Client(timeout=600)
        self.urls = os.environ.get("VLLM_URLS", "http://localhost:8000").split(",")
        self.url = self.urls[dist.get_rank() % len(self.urls)]  # this rank's
        self.name = self.ask(self.url, "GET", "/v1/models")["data"][0]["id"]

    def ask(self, url: str, method: str, path: str, body: dict | None = None) -> dict:
        try:
            answer = self.client.request(method, url + path, json=body).raise_for_status()
            return answer.json() if path.startswith("/v1") else {}
        except Exception as error:
            said = getattr(getattr(error, "response", None), "text", "")[:300]
            fail(f"vLLM server {url}{path}: {error} {said}; when it is back, go on with --resume")

    def sync(self) -> None:
        from safetensors.torch import save_file

        weights = {}
        for name, weight in merged_weights(self.model):  # collective; one rank holds them
            if dist.get_rank() == 0:
                weights[name] = weight.to("cpu", copy=True)
        if dist.get_rank() == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            save_file(weights, self.folder / "model.safetensors")
            call = {"method": "reload_weights", "kwargs": {"weights_path": str(self.folder)}}
            for url in self.urls:
                self.ask(url, "POST", "/collective_rpc", call)
                for cache in ("prefix", "mm", "encoder"):  # they hold what the old weights computed
                    self.ask(url, "POST", f"/reset_{cache}_cache")
        dist.barrier()

    def sample(self, prompts: list[Prompt], num_samples: int, temperature: float) -> list[Response]:
        requests = [self.make_request(prompt, num_samples, temperature) for prompt in prompts]
        with ThreadPoolExecutor(32) as pool:
            answers = pool.map(
                lambda body: self.ask(self.url, "POST", "/v1/chat/completions", body), requests
            )
        responses = []
        for prompt, answer in zip(prompts, answers):
            if answer["prompt_token_ids"] != prompt.ids.tolist():
                fail(f"row {prompt.index}: vLLM reads other tokens than the trainer; use --rollout hf")
            for choice in answer["choices"]:
                ids = torch.tensor(choice["token_ids"])
                logprobs = torch.tensor([token["logprob"] for token in choice["logprobs"]["content"]])
                responses.append(Response(ids, logprobs, truncated=choice["finish_reason"] == "length"))
        return responses

    def make_request(self, prompt: Prompt, num_samples: int, temperature: float) -> dict:
        """In OpenAI's protocol, pictures as data URLs. The seed is the prompt's: batches change nothing."""

        def rename(part: dict) -> dict:
            if part["type"] == "video":  # vLLM counts the positions after one otherwise
                fail(f"row {prompt.index} has a video: use --rollout hf")
            if part["type"] == "text":
                return part
            part["image"].save(buffer := io.BytesIO(), "PNG")
            data = base64.b64encode(buffer.getvalue()).decode()
            return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}

        return {
            "model": self.name,
            "messages": [m | {"content": [*map(rename, m["content"])]} for m in prompt.messages],
            "n": num_samples,
            "temperature": temperature,
            "seed": prompt.seed,
            "max_tokens": self.args.max_response_length,
            "stop_token_ids": self.end_ids,
            "logit_bias": dict.fromkeys(media_token_ids(self.model.config), -100.0),
            "return_token_ids": True,
            "logprobs": True,
            "top_logprobs": 0,
        }
