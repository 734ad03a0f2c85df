r"""Responses of several turns: a sampler generates turns, and environments answer with observations.

    [prompt][turn 1][observation 1][turn 2]...      one response, a *trajectory*

Turns are kept as token ids and are never tokenized again. An observation consists of the
tokens that the chat template writes after an assistant's EOS: the rest of that message (often
a newline), the observation's message, and the generation prompt:

    turn          4 <|im_end|>
    observation   \n <|im_start|> user \n too high <|im_end|> \n <|im_start|> assistant \n
"""

import asyncio
import inspect
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from common import packing
from common.chats import encode_chat, load_media
from common.decoding import Response
from common.packing import Continuation, Prompt, continue_prompt, extend_prompt

TEXT = [{"type": "text", "text": "."}]
SHORT_CHAT = [{"role": "user", "content": TEXT}, {"role": "assistant", "content": TEXT}]
EXAMPLE = {"role": "user", "content": "What else do you see?"}  # an observation for the check at startup
RUNNER = asyncio.Runner()  # one event loop, because async clients belong to one


def await_all(results: list) -> list:
    """Wait for the results that are awaitable, all at the same time. Others stay as they are."""

    async def gather() -> list:
        awaitable = [x if inspect.isawaitable(x) else asyncio.sleep(0, result=x) for x in results]
        return await asyncio.gather(*awaitable)

    return RUNNER.run(gather())


@dataclass
class Trajectory:
    """A response [turn 1][observation 1][turn 2]... while it is sampled."""

    environment: Any
    rng: np.random.Generator  # generates the seeds of turns 2, 3, ...
    sequence: Prompt  # the prompt and the response so far
    remaining_tokens: int  # room for more turns and observations
    # Message, tokens and log-probs (R,) of each turn and observation, which alternate.
    history: list[tuple[dict, Continuation, Tensor]] = field(default_factory=list)
    truncated: bool = False
    overflow: bool = False  # it ended because an observation did not fit

    @property
    def num_turns(self) -> int:
        return (len(self.history) + 1) // 2

    def append(self, message: dict, part: Continuation, logprobs: Tensor) -> None:
        self.history.append((message, part, logprobs))
        self.sequence = extend_prompt(self.sequence, part)
        self.remaining_tokens -= len(part)

    def next_prompt(self) -> Prompt:
        """The trajectory so far, as the prompt of its next turn."""
        seed = int(self.rng.integers(2**31))
        return replace(self.sequence, seed=seed, max_new_tokens=self.remaining_tokens)

    def to_response(self) -> Response:
        messages, parts, logprobs = zip(*self.history)
        continuation = packing.join_continuations(parts)
        return Response(
            token_ids=continuation.input_ids,
            logprobs=torch.cat(logprobs),
            truncated=self.truncated,
            continuation=continuation,
            messages=list(messages),
            environment=self.environment,
        )


@dataclass
class EnvironmentSampler:
    """--environment: a sampler whose responses have up to max_turns turns.

    Each response has its own instance of environment_class;
    docs/recipes.md#tools-and-environments has the protocol. `sampler` generates the turns."""

    args: Any  # the script's
    sampler: Any
    environment_class: type
    model: Any
    processor: Any
    eos_ids: list[int]

    def __post_init__(self):
        self.update_weights = self.sampler.update_weights
        self.sleep = self.sampler.sleep
        self.tokenizer = getattr(self.processor, "tokenizer", self.processor)
        self.short_ids = encode_chat(self.processor, SHORT_CHAT)["input_ids"][0].tolist()
        before = encode_chat(self.processor, SHORT_CHAT[:1], add_generation_prompt=True)["input_ids"]
        # EOS tokens before the assistant's own: many templates end every message with one.
        self.num_eos = int(torch.isin(before, torch.tensor(self.eos_ids)).sum())

    def generate(self, prompts: list[Prompt], num_samples: int, temperature: float) -> list[Response]:
        """num_samples trajectories per prompt, prompt by prompt; greedy at temperature 0."""
        trajectories = [
            Trajectory(
                environment=self.environment_class(),
                rng=np.random.default_rng([prompt.seed, j]),
                sequence=prompt,
                remaining_tokens=self.args.max_response_length,
            )
            for prompt in prompts
            for j in range(num_samples)
        ]
        rows = [x.sequence.row | {"chat": x.sequence.messages} for x in trajectories]
        # This copies lists and dicts, but not images: an environment may change its row.
        rows = tree_map(lambda leaf: leaf, rows)
        returned = await_all([x.environment.reset(**row) for x, row in zip(trajectories, rows)])
        if any(x is not None for x in returned):
            raise TypeError("reset must return None: the first observation belongs in the prompt")
        active = trajectories
        turns = self.sampler.generate(prompts, num_samples, temperature)
        while active:
            for trajectory, turn in zip(active, turns, strict=True):
                token_ids = turn.token_ids[: trajectory.remaining_tokens]  # a sampler may exceed it
                trajectory.truncated = turn.truncated or len(token_ids) < len(turn.token_ids)
                text = self.tokenizer.decode(token_ids, skip_special_tokens=True)
                part = continue_prompt(trajectory.sequence, token_ids)
                message = {"role": "assistant", "content": text}
                trajectory.append(message, part, turn.logprobs[: len(token_ids)])
            running = [trajectory for trajectory in active if not trajectory.truncated]
            texts = [trajectory.history[-1][0]["content"] for trajectory in running]
            observations = await_all([x.environment.step(text) for x, text in zip(running, texts)])
            pairs = zip(running, observations)
            active = [x for x, observation in pairs if self.append_observation(x, observation)]
            if active:
                turns = self.sampler.generate([x.next_prompt() for x in active], 1, temperature)
        # (metric, value) of each response; scripts average them
        self.logged_values = [("rollout/turns_mean", x.num_turns) for x in trajectories]
        self.logged_values += [("rollout/observation_overflow_frac", x.overflow) for x in trajectories]
        return [trajectory.to_response() for trajectory in trajectories]

    def append_observation(self, trajectory: Trajectory, observation) -> bool:
        """Append the observation. False if the episode ends, or has no room for another turn."""
        if observation is None or trajectory.num_turns == self.args.max_turns:
            return False
        if not isinstance(observation, dict):
            observation = {"role": "user", "content": observation}
        part = self.encode_message(trajectory.sequence, observation)
        if len(part) >= trajectory.remaining_tokens:
            trajectory.truncated = trajectory.overflow = True
            return False
        trajectory.append(observation, part, logprobs=torch.zeros(len(part)))
        return True

    def encode_message(self, sequence: Prompt, message: dict = EXAMPLE) -> Continuation:
        """The tokens that follow the assistant's EOS in a short chat with this observation, and its media.

        Their positions are those in the whole sequence, from the model's own get_rope_index."""
        content = message["content"]
        is_list = isinstance(content, list) and all(isinstance(x, dict) and "type" in x for x in content)
        if not isinstance(content, str) and not is_list:
            types = "None, a string, a list of parts, or a message with one of these as content"
            raise TypeError(f"an environment's step must return {types}, not {type(content).__name__}")
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else map(dict, content)
        message = {**message, "content": list(parts)}  # load_media changes these parts
        load_media(self.args, [message], Path(), self.tokenizer)
        inputs = encode_chat(self.processor, [*SHORT_CHAT, message], add_generation_prompt=True)
        chat = packing.make_prompt(self.model, inputs)
        if chat.media_inputs and getattr(self.sampler, "turns_are_text", False):
            raise ValueError("this sampler supports only text in observations")
        for name, x in chat.token_inputs.items():
            if name not in sequence.token_inputs or x.dim() > 2:  # a mask over images
                raise ValueError(f"observations with the input {name} are not supported")
        # The tokens after EOS, such as a newline, belong to the observation. Some templates write no EOS.
        is_eos = torch.isin(chat.input_ids, torch.tensor(self.eos_ids))
        ends = is_eos.nonzero()[self.num_eos :, 0].tolist()
        common = os.path.commonprefix([self.short_ids, chat.input_ids.tolist()])
        start = ends[0] + 1 if ends else len(common)
        observation = continue_prompt(sequence, chat.input_ids[start:])
        observation.response_mask[:] = False
        observation.token_inputs |= {name: x[:, start:] for name, x in chat.token_inputs.items()}
        observation.media_inputs = chat.media_inputs
        longer = extend_prompt(sequence, observation)
        position_ids = packing.compute_position_ids(self.model, longer.inputs)
        observation.position_ids = position_ids[..., sequence.length :]
        return observation
