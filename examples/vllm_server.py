"""vLLM servers, on other GPUs or other machines, as the sampler:

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --logprobs-mode processed_logprobs --port 8000      # one or more
    VLLM_URLS=http://localhost:8000 python rloo.py --model MODEL --sampler examples/vllm_server.py:Servers

The servers load new weights from the run's directory, so they need read access to --output-dir. A sampler is
any class with update_weights(step), which sends the weights that the step made, and generate(), which returns
num_samples responses per prompt (common/decoding.py). The `rloo` imported below is a second copy of the
running script; only functions without state are used from it.
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
from common import stop
from common.decoding import Response
from common.packing import Prompt, media_token_ids
from rloo import iter_full_weights

# A request must name all of these: vllm serve takes what is missing from the model's generation_config.json.
# Qwen2.5-VL's has a repetition penalty, which would sample from another distribution than the trainer's.
WHOLE_DISTRIBUTION = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
WHOLE_DISTRIBUTION |= {"presence_penalty": 0.0, "frequency_penalty": 0.0}


class Servers:
    unsupported_media = {"video"}  # vLLM would sample other frames

    def __init__(self, args, model, eos_ids: list[int], run_dir: Path):
        import httpx

        if getattr(args, "environment", None):  # the chat that is sent to a server has no later turns
            stop("--environment requires --sampler hf or vllm")
        self.args = args
        self.model = model
        self.eos_ids = eos_ids
        self.weights_dir = run_dir.resolve() / "server_weights"
        # No connection is used twice: a server closes idle ones, maybe just as the next request is sent.
        limits = httpx.Limits(max_keepalive_connections=0)
        self.client = httpx.Client(timeout=7200, limits=limits)  # seconds: a request may take a whole rollout
        self.urls = os.environ.get("VLLM_URLS", "http://localhost:8000").split(",")
        self.url = self.urls[dist.get_rank() % len(self.urls)]  # this rank generates with one server
        self.model_name = self.request(self.url, "GET", "/v1/models")["data"][0]["id"]

    def request(self, url: str, method: str, path: str, body: dict | None = None) -> dict:
        try:
            reply = self.client.request(method, url + path, json=body).raise_for_status()
            return reply.json() if reply.content else {}
        except Exception as error:
            details = getattr(getattr(error, "response", None), "text", "")[:300]
            stop(f"vLLM server {url}{path}: {error} {details}; restart it, then continue with --resume")

    def update_weights(self, step: int) -> None:
        """Send the policy's weights to all servers, through a file, and label them with run and step."""
        from safetensors.torch import save_file

        self.version = f"step {step} of {self.weights_dir.parent.name}"
        weights = {}
        for name, weight in iter_full_weights(self.model):  # on all ranks, but only rank 0 keeps them
            if dist.get_rank() == 0:
                weights[name] = weight.to("cpu", copy=True)
        if dist.get_rank() == 0:
            self.weights_dir.mkdir(parents=True, exist_ok=True)
            save_file(weights, self.weights_dir / "model.safetensors")
            with ThreadPoolExecutor() as pool:  # all servers load at the same time
                list(pool.map(self.load_weights, self.urls))
        dist.barrier()

    def load_weights(self, url: str) -> None:
        """Let a server load the weights from the file, and clear its caches."""
        call = {"method": "reload_weights", "kwargs": {"weights_path": str(self.weights_dir)}}
        self.request(url, "POST", "/collective_rpc", call)
        for cache in ("prefix", "mm", "encoder"):
            self.request(url, "POST", f"/reset_{cache}_cache")
        self.request(url, "POST", "/update_weight_version", {"new_version": self.version})

    def sleep(self) -> None:
        """The servers stay awake, because they have their own GPUs."""
        self.version = None  # an answer before update_weights would be stale

    def generate(self, prompts: list[Prompt], num_samples: int, temperature: float) -> list[Response]:
        bodies = [self.make_request(prompt, num_samples, temperature) for prompt in prompts]
        with ThreadPoolExecutor(32) as pool:
            replies = list(
                pool.map(lambda body: self.request(self.url, "POST", "/v1/chat/completions", body), bodies)
            )
        version = self.request(self.url, "GET", "/weight_info")["weight_version"]
        if version != self.version:  # the server was restarted, or another run uses it
            stop(f"vLLM server {self.url} has the weights of {version}, not of {self.version}")
        responses = []
        for prompt, reply in zip(prompts, replies):
            if reply["prompt_token_ids"] != prompt.input_ids.tolist():
                stop(f"row {prompt.row_id}: vLLM tokenizes it differently; use --sampler hf")
            for choice in reply["choices"]:
                ids = torch.tensor(choice["token_ids"])
                logprobs = torch.tensor([token["logprob"] for token in choice["logprobs"]["content"]])
                responses.append(Response(ids, logprobs, truncated=choice["finish_reason"] == "length"))
        return responses

    def make_request(self, prompt: Prompt, num_samples: int, temperature: float) -> dict:
        """An OpenAI chat completion request, with images as data URLs and the prompt's seed."""

        def convert_part(part: dict) -> dict:
            if part["type"] == "text":
                return part
            buffer = io.BytesIO()
            part["image"].save(buffer, "PNG")
            data = base64.b64encode(buffer.getvalue()).decode()
            return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}

        messages = []
        for message in prompt.messages:
            messages.append({**message, "content": [convert_part(part) for part in message["content"]]})
        return {
            "model": self.model_name,
            "messages": messages,
            "n": num_samples,
            "temperature": temperature,
            **WHOLE_DISTRIBUTION,
            "seed": prompt.seed,
            "max_tokens": prompt.max_new_tokens or self.args.max_response_length,
            "stop_token_ids": self.eos_ids,
            "logit_bias": dict.fromkeys(media_token_ids(self.model.config), -100.0),
            "return_token_ids": True,
            "logprobs": True,
            "top_logprobs": 0,
        }
