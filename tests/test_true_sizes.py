"""Packed = one response at a time at the sizes of users, through each script's own functions: Qwen2.5-VL with its
151,936 words (but two thin layers), pictures of different sizes, responses of up to 300 tokens."""

import copy
from types import SimpleNamespace as Parts

import common  # noqa: F401  before transformers # isort: skip
import numpy as np
import pytest
import torch
import transformers
from conftest import TINY, chat, write_jsonl
from PIL import Image
from test_families import build_qwen_vl, text_config

import grm_sft
import ppo_vl
import reward_bt
import rloo
from common import packing

V = 151_936
SIZES = {"square": (476, 476), "wide": (700, 392), "small": (250, 360)}  # 289, 350 and 117 tokens
LONG = ["a teal circle " * 60, "not a box. " * 70, "no", "the second one is wide. " * 25]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Parts:
    """A folder of pictures, model and processor."""
    t, tiny = transformers, transformers.AutoProcessor.from_pretrained(TINY)
    ids = tiny.tokenizer.convert_tokens_to_ids
    config = build_qwen_vl("qwen2_5_vl", ids, text_config("qwen2_5_vl", V))
    config.vision_config.patch_size = 14
    config.vision_config.window_size = 112
    torch.manual_seed(0)
    model = t.Qwen2_5_VLForConditionalGeneration(config).eval()
    for parameter in model.parameters():  # attention that matters
        parameter.data = torch.randn_like(parameter) * 0.15 + (parameter.dim() == 1) * parameter.data
    media = {"image_processor": t.Qwen2VLImageProcessor(), "video_processor": tiny.video_processor}
    media |= {"tokenizer": tiny.tokenizer, "chat_template": tiny.chat_template}
    folder = tmp_path_factory.mktemp("pictures")
    for i, (name, (width, height)) in enumerate(SIZES.items()):
        pixels = np.random.default_rng(i).integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{name}.png")
    return Parts(folder=folder, model=model, processor=t.Qwen2_5_VLProcessor(**media))


def load(script, whole: Parts, questions: list[tuple], **flags) -> tuple:
    """-> args, and what the script's load_data gives for the rows."""
    args = script.Args(micro_batch_tokens=2048, **flags)
    rows = [
        {"prompt": text, "images": [f"{x}.png" for x in images], **more} for text, images, more in questions
    ]
    given = [args, write_jsonl(whole.folder / "rows.jsonl", rows), "train", whole.model, whole.processor]
    if script is reward_bt:
        given.insert(3, 0)  # its seed
    return args, script.load_data(*given, *[True] * (script is grm_sft))


def one_by_one(model, prompt: packing.Prompt, ids: torch.Tensor, temperature: float = 1.0) -> tuple:
    """Log-probs (R,) and hidden states (R + 1, H) from the prompt's last token on, by the model's own forward."""
    more = {"input_ids": ids[None], "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}
    more["mm_token_type_ids"] = torch.zeros(1, len(ids), dtype=torch.long)
    inputs = prompt.inputs | {name: torch.cat([prompt.inputs[name], x], 1) for name, x in more.items()}
    out = model(**inputs, logits_to_keep=len(ids) + 1, output_hidden_states=True)
    logits = out.logits[0, :-1] / temperature
    logits[:, packing.media_token_ids(model.config)] = -torch.inf
    logp = logits.log_softmax(-1).gather(1, ids[:, None])[:, 0]
    return logp, out.hidden_states[-1][0, prompt.length - 1 :]


def of_policy(script, whole: Parts) -> tuple:
    """rloo.py and ppo_vl.py: two responses of all words to each of four prompts -> the module that trains, its
    packs, all pairs, what the module gives for a pack, and what it should give for a pair."""
    questions = [("<image>What is it?", ["square"], {}), ("Is <image> like <image>?", ["wide", "small"], {})]
    questions += [("Hello.", [], {}), ("And <image> again?", ["square"], {})]
    args, data = load(script, whole, questions, rewards=(), reward_weights=(), temperature=0.7)
    lengths = [300, 257, 299, 40, 256, 1, 120, 300]
    responses = [torch.randint(600, V, (R,), generator=torch.Generator().manual_seed(R)) for R in lengths]
    rollout = Parts(prompts=[data.encode(i) for i in range(4)], response_ids=responses)
    run = Parts(train_data=data, device="cpu", actor=Parts(module=whole))
    packs = script.packs_of(args, run, rollout, [(i, [2 * i, 2 * i + 1]) for i in range(4)])
    pairs = [(rollout.prompts[b // 2], ids, 0.7) for b, ids in enumerate(responses)]
    if script is rloo:
        module = rloo.Policy(whole.model, 0.7)
        return module, packs, pairs, lambda m, pack: m(pack)[0], lambda m, logp, hidden: logp
    module = ppo_vl.Actor(args, whole.model, value_head=torch.nn.Linear(64, 1, bias=False))
    exact = lambda m, logp, hidden: torch.stack([logp, m.value_head(hidden[:-1])[:, 0]], 1)  # noqa: E731
    return module, packs, pairs, lambda m, pack: torch.stack(m(pack)[0:3:2], 1), exact


def of_rewards(script, whole: Parts) -> tuple:
    questions = [("<image>What is it?", ["square"], {"responses": LONG})]
    questions += [("Is <image> like <image>?", ["wide", "small"], {"responses": LONG[:2]})]
    args, data = load(script, whole, questions)
    module, rankings = reward_bt.RewardModel(whole.model), [data.encode(i) for i in range(2)]
    packs = reward_bt.packs_of(args, Parts(device="cpu", engine=Parts(module=module)), data, rankings)
    pairs = [(ranking.prompt, ids) for ranking in rankings for ids in ranking.responses]
    return module, packs, pairs, lambda m, pack: m(pack), lambda m, logp, hidden: m.score(hidden[-1])


def of_judge(script, whole: Parts) -> tuple:
    """Pairs that share two pictures, one of texts, and a chat of two answers; trained from the turns on."""
    sides = {"image_0": "square.png", "image_1": "wide.png"}
    verdicts = zip(LONG, ["1", "2", "tie", "1"])
    rows = [("a box", [], {**sides, "verdict": x, "reasoning": text.strip()}) for text, x in verdicts]
    texts = {"answer_0": "4", "answer_1": "5", "verdict": "1"}
    turns = chat("<image>Good?", LONG[2], "Sure?", LONG[1])
    rows += [("What is 2 + 2?", [], texts), ("", ["small"], {"messages": turns})]
    args, data = load(script, whole, rows)
    entries = [0, 1, 2, 4, 6, 8, 9, 10]
    samples, module = grm_sft.load_samples(data, entries), grm_sft.Judge(whole.model)
    run = Parts(train_data=data, device="cpu", judge=Parts(module=module))
    own = [sample for entry in entries for sample in data.encode(entry).samples]
    pairs = [(sample.prompt, sample.response_ids) for sample in own]
    starts = iter([sample.start for sample in own])
    exact = lambda m, logp, hidden: logp[next(starts) :]  # noqa: E731
    return module, grm_sft.packs_of(args, run, samples), pairs, lambda m, pack: m(pack), exact


CASES = {rloo: of_policy, ppo_vl: of_policy, reward_bt: of_rewards, grm_sft: of_judge}


@pytest.mark.slow
@pytest.mark.parametrize("script", CASES, ids=lambda script: script.__name__)
def test_packed_is_one_by_one(script, whole):
    torch.manual_seed(1)
    whole = Parts(folder=whole.folder, model=copy.deepcopy(whole.model), processor=whole.processor)
    packing.set_attention(whole.model, "packed")
    module, packs, pairs, forward, exact = CASES[script](script, whole)
    plain, packs, expected, weights = copy.deepcopy(module), list(packs), [], []
    packing.set_attention(plain.model, "sdpa")
    for pair in pairs:
        x = exact(plain, *one_by_one(plain.model, *pair))
        weights.append(torch.randn_like(x))
        (x * weights[-1]).sum().backward()
        expected.append(x.detach())
    assert len(packs) > 1 and sorted(b for pack in packs for b in pack.response_index) == [*range(len(pairs))]
    largest = max(len(pack.target_ids) for pack in packs)
    assert largest > 2 * packing.LOGITS_CHUNK and largest % packing.LOGITS_CHUNK  # beyond what is kept, a short last one
    for pack in packs:
        x = forward(module, pack)
        wanted, weight = (torch.cat([table[b] for b in pack.response_index]) for table in (expected, weights))
        torch.testing.assert_close(x.detach(), wanted, atol=2e-4, rtol=0)
        (x * weight).sum().backward()
    found, wanted = (dict(m.named_parameters()) for m in (module, plain))
    total = sum(float(p.grad.norm()) ** 2 for p in wanted.values() if p.grad is not None) ** 0.5
    for name, exact in ((name, p.grad) for name, p in wanted.items()):
        gap = 0.0 if exact is None and found[name].grad is None else (found[name].grad - exact).norm()
        assert gap == 0 or gap <= 1e-4 * exact.norm() + 1e-6 * total, name
