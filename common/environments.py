"""Responses of several turns: a sampler generates turns, and environments answer with observations.

    [prompt][turn 1][observation 1][turn 2]...      one response, a *trajectory*

Turns are kept as token ids and are never tokenized again. An observation consists of the tokens
that the chat template writes after an assistant's EOS: the rest of that message (often a newline),
the observation's message, and the generation prompt.
"""

import asyncio
import contextlib
import inspect
import itertools
import warnings
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from common.packing import (
    Prompt,
    Response,
    append_chat_tokens,
    continue_prompt,
    encode_chat,
    escape_special_tokens,
    extend_prompt,
    make_prompt,
    slice_continuation,
)

TEXT = [{"type": "text", "text": "."}]
SHORT_CHAT = [{"role": "user", "content": TEXT}, {"role": "assistant", "content": TEXT}]
RUNNER = asyncio.Runner()  # one event loop for environments and rewards: async clients belong to a loop


def await_all(awaitables: Iterable[Awaitable]) -> list:
    """Results of awaitables, which run concurrently."""

    async def gather() -> list:
        return await asyncio.gather(*awaitables)

    return RUNNER.run(gather())


@dataclass
class Trajectory:
    """A response [turn 1][observation 1][turn 2]... while it is sampled."""

    prompt: Prompt
    environment: Any
    rng: np.random.Generator  # generates the seeds of turns 2, 3, ...
    sequence: Prompt  # the prompt and the response so far
    messages: list[dict] = field(default_factory=list)  # turns and observations
    logprobs: Tensor = field(default_factory=lambda: torch.zeros(0))  # (R,): 0 for observations
    loss_mask: Tensor = field(default_factory=lambda: torch.zeros(0).bool())  # (R,): False for observations
    truncated: bool = False
    observation_overflow: bool = False  # it ended because an observation did not fit

    @property
    def num_turns(self) -> int:
        return (len(self.messages) + 1) // 2

    def append(self, sequence: Prompt, message: dict, logprobs: Tensor | None) -> None:
        """Append a turn with its log-probs, or an observation with None; its tokens end `sequence`."""
        R = sequence.length - self.sequence.length
        self.sequence = sequence
        self.messages.append(message)
        self.logprobs = torch.cat([self.logprobs, torch.zeros(R) if logprobs is None else logprobs])
        self.loss_mask = torch.cat([self.loss_mask, torch.full((R,), logprobs is not None)])


class EnvironmentSampler:
    """--environment: a sampler whose responses have up to max_turns turns and max_length tokens.

    environment_class: see docs/recipes.md#tools-and-environments. Each response has its own
    instance. update_weights and sleep are those of `sampler`, which generates the turns."""

    def __init__(
        self, sampler, environment_class: type, model, processor,
        eos_ids: list[int], max_turns: int, max_length: int,
    ):  # fmt: skip
        self.sampler = sampler
        self.environment_class = environment_class
        self.model = model
        self.processor = processor
        self.tokenizer = getattr(processor, "tokenizer", processor)
        self.eos_ids = torch.tensor(eos_ids)
        self.max_turns = max_turns
        self.max_length = max_length
        self.logged_values = {}  # metric name -> one value per response of the last call of generate
        self.short_ids = encode_chat(processor, SHORT_CHAT)["input_ids"][0]
        before = encode_chat(processor, SHORT_CHAT[:1], add_generation_prompt=True)["input_ids"][0]
        self.num_eos = int(torch.isin(before, self.eos_ids).sum())  # before the assistant's EOS
        self.checked_template = False
        self.update_weights = sampler.update_weights
        self.sleep = sampler.sleep

    def generate(self, prompts: list[Prompt], num_samples: int, temperature: float) -> list[Response]:
        """num_samples trajectories per prompt, in order of prompts; greedy if temperature is 0."""
        if prompts and not self.checked_template:
            self.check_template(prompts[0])
        trajectories = []
        for prompt in prompts:
            for j in range(num_samples):
                rng = np.random.default_rng([prompt.seed, j])
                trajectories.append(Trajectory(prompt, self.environment_class(), rng, sequence=prompt))
        self.call_all(self.reset, trajectories)
        active = trajectories
        turns = self.sampler.generate(prompts, num_samples, temperature)
        while active:
            for trajectory, turn in zip(active, turns):
                self.append_turn(trajectory, turn)
            active = [trajectory for trajectory in active if not trajectory.truncated]
            observations = self.call_all(self.step, active)
            active = [
                x for x, observation in zip(active, observations) if self.append_observation(x, observation)
            ]
            if active:
                next_prompts = [replace(x.sequence, seed=int(x.rng.integers(2**31))) for x in active]
                turns = self.sampler.generate(next_prompts, 1, temperature)
        self.logged_values = {
            "rollout/turns_mean": [x.num_turns for x in trajectories],
            "rollout/observation_overflow_frac": [x.observation_overflow for x in trajectories],
        }
        responses = []
        for x in trajectories:
            continuation = slice_continuation(x.sequence, x.prompt, x.loss_mask)
            response = Response(
                token_ids=continuation.inputs["input_ids"][0],
                logprobs=x.logprobs,
                truncated=x.truncated,
                continuation=continuation,
                messages=x.messages,
                environment=x.environment,
            )
            responses.append(response)
        return responses

    def append_turn(self, trajectory: Trajectory, turn: Response) -> None:
        """Append a turn, truncated so that the whole response has at most max_length tokens."""
        room = self.max_length - len(trajectory.loss_mask)
        token_ids = turn.token_ids[:room]
        sequence = extend_prompt(trajectory.sequence, continue_prompt(trajectory.sequence, token_ids))
        text = self.tokenizer.decode(token_ids, skip_special_tokens=True)
        trajectory.append(sequence, {"role": "assistant", "content": text}, turn.logprobs[:room])
        trajectory.truncated = turn.truncated or len(turn.token_ids) > room

    @contextlib.contextmanager
    def error_note(self, trajectory: Trajectory) -> Iterator[None]:
        """Add the environment, the turn and the dataset row to an error."""
        try:
            yield
        except Exception as error:
            name = self.environment_class.__name__
            row = trajectory.prompt.index
            error.add_note(f"In turn {trajectory.num_turns} of environment {name}, dataset row {row}.")
            raise

    def call_all(self, function: Callable, trajectories: list[Trajectory]) -> list:
        """Results of a function for each trajectory; async functions run concurrently."""

        async def wait(trajectory: Trajectory, awaitable: Awaitable):
            with self.error_note(trajectory):
                return await awaitable

        results = {}
        pending = {}
        for k, trajectory in enumerate(trajectories):
            with self.error_note(trajectory):
                results[k] = function(trajectory)
            if inspect.isawaitable(results[k]):
                pending[k] = wait(trajectory, results[k])
        results |= zip(pending, await_all(pending.values()))
        return list(results.values())

    def reset(self, trajectory: Trajectory) -> Awaitable | None:
        """Start an episode with the prompt and the columns of its dataset row."""
        prompt = trajectory.prompt
        keywords = {**prompt.row, "chat": prompt.messages}  # tree_map copies lists and dicts, not media
        return trajectory.environment.reset(**tree_map(lambda x: x, keywords))

    def step(self, trajectory: Trajectory):
        """Pass the last turn to the environment."""
        return trajectory.environment.step(trajectory.messages[-1]["content"])

    def append_observation(self, trajectory: Trajectory, observation) -> bool:
        """Append the observation. False if it ends the episode or leaves no room for another turn."""
        if observation is None or trajectory.num_turns == self.max_turns:
            return False
        is_message = isinstance(observation, dict)
        message = observation if is_message else {"role": "user", "content": observation}
        with self.error_note(trajectory):
            sequence = self.append_message(trajectory.sequence, message)
        if sequence.length - trajectory.prompt.length >= self.max_length:  # no room for another turn
            trajectory.truncated = trajectory.observation_overflow = True
            return False
        trajectory.append(sequence, message, logprobs=None)
        return True

    def append_message(self, sequence: Prompt, message: dict) -> Prompt:
        """Append the tokens that follow the assistant's EOS in a short chat with this observation."""
        message = {**message, "content": build_parts(message["content"], self.tokenizer)}
        inputs = encode_chat(self.processor, [*SHORT_CHAT, message], add_generation_prompt=True)
        chat = make_prompt(self.model, inputs)
        # The tokens after EOS, such as a newline, belong to the observation. Some templates write no EOS.
        ends = torch.isin(chat.input_ids, self.eos_ids).nonzero()[self.num_eos :, 0]
        if len(ends) > 0:
            start = int(ends[0]) + 1
        else:  # the observation follows the common prefix of both chats
            pairs = zip(self.short_ids.tolist(), chat.input_ids.tolist())
            start = len([*itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)])
        return append_chat_tokens(self.model, sequence, chat, start)

    def check_template(self, prompt: Prompt) -> None:
        """Warn if the template renders a whole chat differently from what is appended turn by turn."""
        self.checked_template = True
        user, assistant = SHORT_CHAT
        ids = encode_chat(self.processor, [user, assistant, user])["input_ids"][0]
        eos = ids[torch.isin(ids, self.eos_ids)][self.num_eos :][:1]  # empty if the template writes none
        text_ids = self.tokenizer(".", add_special_tokens=False, return_tensors="pt")["input_ids"][0]
        turn = continue_prompt(prompt, torch.cat([text_ids, eos]))
        sequence = self.append_message(extend_prompt(prompt, turn), user)
        appended = torch.cat([sequence.input_ids, text_ids])
        chat = [*prompt.messages, assistant, user, assistant]
        rendered = encode_chat(self.processor, chat)["input_ids"][0, : len(appended)]
        if not torch.equal(appended, rendered):
            texts = [self.tokenizer.decode(ids[prompt.length :]) for ids in (rendered, appended)]
            warnings.warn(
                f"the chat template renders two turns and an observation as {texts[0]!r}, "
                f"but the model is trained on {texts[1]!r}",
                stacklevel=2,
            )


def build_parts(content, tokenizer) -> list[dict]:
    """The content of an observation, a string or a list of parts with PIL images, as a list of parts."""
    if not isinstance(content, str | list):
        types = "None, a string, a list of parts or a message"
        raise TypeError(f"step must return {types}, not {type(content).__name__}")
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    special_tokens = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    parts = []
    for part in content:
        if part["type"] == "text":
            part = {"type": "text", "text": escape_special_tokens(part["text"], special_tokens)}
        else:
            part = {"type": "image", "image": part["image"].convert("RGB")}
        parts.append(part)
    return parts


def trajectory_columns(messages: list[dict]) -> dict[str, str]:
    """The texts of a trajectory for logs: {"turn/1": text, "observation/1": text, "turn/2": text}."""
    columns = {}
    for k, message in enumerate(messages):
        content = message["content"]
        if not isinstance(content, str):
            content = "".join(part.get("text", "<image>") for part in content)
        columns[f"{('turn', 'observation')[k % 2]}/{k // 2 + 1}"] = content
    return columns
