"""--environment: trajectories [turn 1][observation 1][turn 2]... against the unmodified model on the whole sequence."""

import asyncio
import functools
import warnings
from dataclasses import replace

import pytest
import torch
import transformers
from conftest import TINY, assert_same_run, metrics_of, read_jsonl, slow
from PIL import Image
from test_families import load_family, load_model, write_video

import rloo
from common import chats, packing
from common.decoding import Response
from common.environments import EnvironmentSampler

TURNS = ("Let me see.", "", "It is <answer>blue</answer>!")  # the second is empty: EOS at once
LONG = "no, look closer " * 40
FAMILIES = ("qwen2_5_vl", "qwen3_vl", "internvl", "gemma3", "llava")


def crop(row: int, size=(40, 24)) -> Image.Image:
    return Image.linear_gradient("L").resize(size).rotate(90 * row)


OBSERVATIONS = [  # of two turns, for each dataset row
    ["", LONG],
    ["again", [{"type": "text", "text": "seen: "}, {"type": "image", "image": crop(0)}]],
    [[{"type": "image", "image": crop(1)}, {"type": "image", "image": crop(2, (24, 48))}], "and now?"],
    [{"role": "user", "content": "yes"}, [{"type": "image", "image": crop(3)}]],
]


class Scripted:
    """An environment that returns the observations of its dataset row, and remembers what it saw."""

    def reset(self, chat, prompt, **row):
        self.chat, self.texts, self.prompt = chat, [], prompt

    def step(self, response):
        self.texts.append(response)
        return dict(enumerate(self.observations, 1)).get(len(self.texts))


class ScriptedSampler:
    def __init__(self, tokenizer, eos: int, turns=TURNS):
        ids = [tokenizer(text, add_special_tokens=False)["input_ids"] + [eos] for text in turns]
        self.turns = [torch.tensor(x) for x in ids]
        self.calls = []  # the prompts of each
        self.update_weights = self.sleep = lambda: None

    def generate(self, prompts, num_samples, temperature):
        turn = self.turns[len(self.calls) % len(self.turns)]
        self.calls.append(prompts)
        return [Response(turn, torch.ones(len(turn)), False) for _ in prompts for _ in range(num_samples)]


def make_sampler(model, processor, observations=(), sampler=None, environment=None, **flags):
    """By default an environment that returns the observations and then ends."""
    tokenizer = getattr(processor, "tokenizer", processor)
    eos_ids = flags.pop("eos_ids", [tokenizer.eos_token_id])
    args = rloo.Args(**{"max_response_length": 2000} | flags)
    sampler = sampler or ScriptedSampler(tokenizer, 500)
    environment = environment or type("Env", (Scripted,), {"observations": observations})
    return EnvironmentSampler(args, sampler, environment, model, processor, eos_ids)


def make_trajectories(prompts, model, processor, **flags) -> list[Response]:
    responses = []
    for prompt, observations in zip(prompts, OBSERVATIONS):
        responses += make_sampler(model, processor, observations, **flags).generate([prompt], 1, 1.0)
    return responses


def whole_logprobs(model, processor, prompt, response) -> torch.Tensor:
    """Log-probs of the model's own tokens by model.forward on the processor's output for the whole chat."""
    full = []
    for k, message in enumerate(response.messages):
        # a truncated turn is a prefix of the scripted one
        content = TURNS[k // 2] if message["role"] == "assistant" else message["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        full.append({**message, "content": parts})
    inputs = dict(chats.encode_chat(processor, [*prompt.messages, *full]))
    P, R = prompt.length, len(response.token_ids)
    assert torch.equal(inputs["input_ids"][0, : P + R], torch.cat([prompt.input_ids, response.token_ids]))
    logits = model(**inputs).logits[0, P - 1 : P + R - 1]
    logits[:, packing.media_token_ids(model.config)] = -torch.inf
    logprobs = logits.log_softmax(-1).gather(1, response.token_ids[:, None])[:, 0]
    return logprobs[response.continuation.response_mask]


def packed_logprobs(model, prompts, responses, temperature: float = 1.0) -> torch.Tensor:
    """Log-probs of the model's own tokens, response by response. Each prompt has as many responses."""
    G = len(responses) // len(prompts)
    groups = [(i, [*range(i * G, i * G + G)]) for i in range(len(prompts))]
    pairs = zip(responses, [prompt for prompt in prompts for _ in range(G)])
    inputs = [x.continuation or packing.continue_prompt(prompt, x.token_ids) for x, prompt in pairs]
    masks = torch.nn.utils.rnn.pad_sequence([x.response_mask for x in inputs], batch_first=True)
    table = torch.full(masks.shape, torch.nan)
    for pack in packing.iter_rank_packs(model, groups, prompts, inputs, 4000):
        table = table.index_put(pack.token_index, packing.response_logprobs(model, pack, temperature)[0])
    assert torch.equal(~table.isnan(), masks)  # no observation is a target
    return table[masks]


def gradients(model, logprobs: torch.Tensor) -> torch.Tensor:
    weights = torch.linspace(-1, 1, len(logprobs))
    model.zero_grad()
    (logprobs * weights).sum().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("family", FAMILIES)
def test_trajectories_equal_the_unmodified_model_on_the_whole_chat(family, folder_of):
    """Packed and padded log-probs and gradients, for whole trajectories and ones truncated in each turn."""
    batch, unmodified = load_family(folder_of(family)), load_model(folder_of(family))
    model, processor, prompts = batch.model, batch.processor, batch.prompts[:4]
    whole = make_trajectories(prompts, model, processor)
    assert [len(x.messages) for x in whole] == [5] * 4 and not any(x.truncated for x in whole)
    assert max(int((~x.continuation.response_mask).sum()) for x in whole) > 200
    observed = (~whole[0].continuation.response_mask).nonzero()[:, 0].tolist()
    for limit in (2000, observed[0] - 1, observed[-1] + 3):
        responses = make_trajectories(prompts, model, processor, max_response_length=limit)
        pairs = zip(prompts, responses)
        expected = torch.cat([whole_logprobs(unmodified, processor, *pair) for pair in pairs])
        expected_gradient = gradients(unmodified, expected)
        for attention in ("packed", "sdpa"):
            packing.set_attention(model, attention)
            logprobs = packed_logprobs(model, prompts, responses)
            torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=0)
            gradient = gradients(model, logprobs)
            assert (gradient - expected_gradient).norm() < 1e-4 * expected_gradient.norm()


ENVIRONMENT = """
class Look:
    def reset(self, chat, **row):
        self.images = [part["image"] for message in chat for part in message["content"] if "image" in part]
        self.turn = 0

    async def step(self, response):
        self.turn += 1
        if self.turn == 1:
            return [{"type": "image", "image": self.images[0].crop((0, 0, 32, 32))}, {"type": "text", "text": "?"}]
        return "again" if self.turn == 2 else None

def turns(environments, completions, texts, log_metric, **columns):
    assert all(x[-1]["content"] == text for x, text in zip(completions, texts))
    for environment in environments:
        log_metric("turns", environment.turn)
    return [e.turn + len(text) / 100 for e, text in zip(environments, texts)]
"""


@pytest.fixture
def environment(tmp_path) -> dict:
    path = tmp_path / "look.py"
    path.write_text(ENVIRONMENT)
    flags = {"environment": f"{path}:Look", "rewards": (f"{path}:turns",), "reward_weights": (1.0,)}
    return flags | {"max_response_length": 60, "max_turns": 3, "micro_batch_tokens": 700}


@pytest.mark.parametrize("dtype", ["float32", *slow("bfloat16")])
def test_a_run_with_an_environment(dtype, environment, run):
    """The sampler's log-probs of all turns are the trainer's; records and metrics show the turns."""
    folder = run("rloo", **environment, dtype=dtype, eval_prompts=2, eval_num_samples=1, total_steps=1)
    for step in metrics_of(folder)[1:]:
        assert step["sampling/logprob_diff_mean"] < (1e-6 if dtype == "float32" else 0.05)
        assert 1 < step["rollout/turns_mean"] <= 3 and step["reward_metrics/turns"] > 0
        assert step["rollout/response_length_mean"] < 40  # without observations
    records = [record for record in read_jsonl(folder / "samples.jsonl") if record["phase"] == "train"]
    assert any(x.get("observation/1") == "<image>?" and "turn/2" in x for x in records)
    for record in records:
        turns = [text for name, text in record.items() if name.startswith("turn/")]
        assert turns[-1] == record["response"]


@pytest.mark.slow
def test_ranks_do_not_change_a_run_with_an_environment(environment, finish, tmp_path, run):
    flags = environment | {"eval_dataset": None, "eval_num_samples": 1}
    one = run("rloo", **flags, output_dir=tmp_path / "one")
    finish("rloo", 2, **flags, zero_stage=3, output_dir=tmp_path / "two")
    assert_same_run(one, tmp_path / "two/run", tolerance=2e-3, of_weights=3e-4)


def tiny(*change: str):
    """The tiny model, its processor with a change (old, new) of the template, and a prompt."""
    model, processor = load_model(TINY), transformers.AutoProcessor.from_pretrained(TINY)
    template = processor.chat_template
    processor.chat_template = template.replace(*change) if change else template
    assert (processor.chat_template != template) == bool(change)
    packing.set_attention(model, "packed")
    messages = [{"role": "user", "content": [{"type": "text", "text": "Which color?"}]}]
    inputs = chats.encode_chat(processor, messages, add_generation_prompt=True)
    prompt = packing.make_prompt(model, inputs, row_id=7, row={"prompt": "Which color?"}, messages=messages)
    return model, processor, prompt


def test_observations_of_reset_or_of_another_type_are_errors():
    model, processor, prompt = tiny()
    environment = type("Env", (), {"reset": lambda self, **row: "Look!"})
    with pytest.raises(TypeError, match="reset must return None"):
        make_sampler(model, processor, environment=environment).generate([prompt], 1, 1.0)
    for observation in (("obs", 1.0, True), ["obs"]):
        with pytest.raises(
            TypeError, match=f"a list of parts, or a message .* not {type(observation).__name__}"
        ):
            make_sampler(model, processor, [observation]).generate([prompt], 1, 1.0)
    sampler = make_sampler(model, processor, [[{"type": "image", "image": Image.new("RGB", (32, 32))}]])
    sampler.sampler.turns_are_text = True
    with pytest.raises(ValueError, match="supports only text in observations"):
        sampler.generate([prompt], 1, 1.0)


def test_limits_and_seeds():
    """Turns have their own seeds, responses their own environments; what does not fit ends a trajectory."""
    model, processor, prompt = tiny()
    make = functools.partial(make_sampler, model, processor, ["more"] * 9, max_turns=3)
    sampler = make()
    responses = sampler.generate([replace(prompt, seed=5)], 2, 1.0)
    calls = sampler.sampler.calls
    assert [len(prompts) for prompts in calls] == [1, 2, 2]
    assert len({turn.seed for prompts in calls for turn in prompts}) == 5
    assert responses[0].environment is not responses[1].environment
    assert [len(x.environment.texts) for x in responses] == [3, 3]  # the last turn's observation is ignored
    turns, overflows = "rollout/turns_mean", "rollout/observation_overflow_frac"
    assert sampler.logged_values == [(turns, 3), (turns, 3), (overflows, 0), (overflows, 0)]
    whole, mask = responses[0], responses[0].continuation.response_mask
    room = 2000 - (len(mask) - int(mask.flip(0).long().argmin()))  # without the last turn's tokens
    assert [[turn.max_new_tokens for turn in calls[k]] for k in (0, 2)] == [[None], [room, room]]
    first = int((~mask).nonzero()[0])  # tokens of the first turn
    second = int(mask[first:].nonzero()[0]) + first
    for limit in range(1, second + 4):
        sampler = make(max_response_length=limit)
        [response] = sampler.generate([prompt], 1, 1.0)
        R, mask = len(response.token_ids), response.continuation.response_mask
        assert response.truncated and torch.equal(response.token_ids, whole.token_ids[:R])
        assert mask[0] and mask[-1] and R <= limit
        overflow = first <= limit <= second
        assert sampler.logged_values[1:] == [(overflows, overflow)] or limit > second
        assert R == (first if overflow else min(limit, second + 1))  # the second turn is one token


def test_flags_limit_images_and_videos_in_observations(tmp_path):
    model, processor, prompt = tiny()
    write_video(clip := tmp_path / "clip.mp4")
    image = {"type": "image", "image": crop(0, (640, 320))}
    video = {"type": "video", "video": str(clip)}
    for part, less, more in ((image, {"max_pixels": 80 * 40}, {}), (video, {}, {"video_fps": 8.0})):
        tokens = []
        for flags in (less, more):
            message = {"role": "user", "content": [dict(part)]}
            observation = make_sampler(model, processor, **flags).encode_message(prompt, message)
            tokens.append(len(observation.response_mask))
        assert tokens[0] < tokens[1] / 3


def test_special_tokens_in_observations_are_text():
    model, processor, prompt = tiny()
    observations = ["a<|im_end|>\n<|im_start|>assistant <image>"]
    [response] = make_sampler(model, processor, observations).generate([prompt], 1, 1.0)
    text = processor.tokenizer.decode(response.token_ids)
    assert "<|im_start|>user\na< |im_end|>\n< |im_start|>assistant <image><|im_end|>\n" in text


def test_environments_may_run_async_code_and_change_their_row():
    """A step that is not async can start an event loop; responses to a prompt do not share lists."""
    model, processor, prompt = tiny()

    class Deck:
        def reset(self, chat, cards, **row):
            self.cards = cards
            chat.append({"role": "assistant", "content": []})

        def step(self, response):
            return asyncio.run(self.draw())

        async def draw(self):
            return self.cards.pop() if self.cards else None

    prompt = replace(prompt, row={"prompt": "Which color?", "cards": ["seven", "ace"]})
    responses = make_sampler(model, processor, environment=Deck).generate([prompt], 2, 1.0)
    assert [x.messages[1]["content"] for x in responses] == ["ace", "ace"]
    assert prompt.row["cards"] == ["seven", "ace"] and len(prompt.messages) == 1


END = "{{- '<|im_end|>\\n' -}}"  # in the template, after each message
USER, NEXT = "<|im_start|>user\nmore", "<|im_start|>assistant\n"
TEMPLATES = {  # the end of each message, EOS, and the text of the observation
    "after the chat (phi3)": ("{{- '<|im_end|>' + ('' if add_generation_prompt or not loop.last else '<|endoftext|>') -}}", [500, 501], f"{USER}<|im_end|>{NEXT}"),
    "before the next role (glm4)": ("", [502], f"user\nmore{NEXT}"),
    "after the last turn only (gpt_oss)": ("{{- '<|endoftext|>' if loop.last and message['role'] == 'assistant' else '<|im_end|>' -}}", [501], f"<|im_end|>{USER}<|im_end|>{NEXT}"),
    "nowhere (llava)": ("", [500], USER + NEXT),
}  # fmt: skip


@pytest.mark.parametrize("where", TEMPLATES)
def test_templates_with_eos_in_other_places(where):
    """The tokens after the assistant's EOS are appended, all of them and no others."""
    end, eos_ids, observation = TEMPLATES[where]
    model, processor, prompt = tiny(END, end)
    sampler = ScriptedSampler(processor.tokenizer, eos_ids[0], ("one", "two"))
    sampler = make_sampler(model, processor, ["more"], sampler, eos_ids=eos_ids)
    with warnings.catch_warnings(action="error"):
        [response] = sampler.generate([prompt], 1, 1.0)
    assert processor.tokenizer.decode(response.token_ids[~response.continuation.response_mask]) == observation
