"""Packed log-probs and gradients equal the unmodified model at real sizes, through the functions of both RL scripts:
Qwen2.5-VL with its vocabulary of 151,936 but two thin layers, images of several sizes, responses of 300 tokens."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace as Parts

import common  # noqa: F401  before transformers # isort: skip
import numpy as np
import pytest
import torch
import transformers
from conftest import TINY, write_jsonl
from PIL import Image
from test_families import build_qwen_vl, text_config
from test_multi_turn import Scripted, ScriptedSampler, make_sampler

import ppo_vl
import rloo
from common import packing
from common.decoding import Response

V = 151_936
SIZES = {"square": (476, 476), "wide": (700, 392), "small": (250, 360)}  # 289, 350 and 117 tokens
LONG = ["a teal circle " * 60, "not a box. " * 70, "no", "the second one is wide. " * 25]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Parts:
    """A folder with images, a model and a processor."""
    t, tiny = transformers, transformers.AutoProcessor.from_pretrained(TINY)
    ids = tiny.tokenizer.convert_tokens_to_ids
    config = build_qwen_vl("qwen2_5_vl", ids, text_config("qwen2_5_vl", V))
    config.vision_config.patch_size = 14
    config.vision_config.window_size = 112
    torch.manual_seed(0)
    model = t.Qwen2_5_VLForConditionalGeneration(config).eval()
    for parameter in model.parameters():  # with the usual 0.02, a wrong layout would change little
        parameter.data = torch.randn_like(parameter) * 0.15 + (parameter.dim() == 1) * parameter.data
    media = {"image_processor": t.Qwen2VLImageProcessor(), "video_processor": tiny.video_processor}
    media |= {"tokenizer": tiny.tokenizer, "chat_template": tiny.chat_template}
    folder = tmp_path_factory.mktemp("images")
    for i, (name, (width, height)) in enumerate(SIZES.items()):
        pixels = np.random.default_rng(i).integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{name}.png")
    return Parts(folder=folder, model=model, processor=t.Qwen2_5_VLProcessor(**media))


def load_rows(script, whole: Parts, load, questions: list[tuple], **flags) -> tuple:
    """The script's args, and its dataset of the rows (prompt, image names, other columns)."""
    args = script.Args(micro_batch_tokens=2048, max_prompt_length=1024, zero_stage=0, **flags)
    rows = [{"prompt": text, "images": [f"{x}.png" for x in names], **row} for text, names, row in questions]
    return args, load(args, write_jsonl(whole.folder / "rows.jsonl", rows), "train")


def unmodified_forward(model, prompt, ids: torch.Tensor, temperature: float = 1.0, inputs=None) -> tuple:
    """Log-probs (R,), and hidden states (R + 1, H) from the prompt's last token on, by model.forward.

    inputs: of the whole sequence, if they do not follow from the prompt and the ids."""
    extension = {"input_ids": ids[None], "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}
    extension["mm_token_type_ids"] = torch.zeros(1, len(ids), dtype=torch.long)
    if inputs is None:
        inputs = {name: torch.cat([prompt.inputs[name], x], 1) for name, x in extension.items()}
        inputs = prompt.inputs | inputs
    out = model(**inputs, logits_to_keep=len(ids) + 1, output_hidden_states=True)
    logits = out.logits[0, :-1] / temperature
    logits[:, packing.media_token_ids(model.config)] = -torch.inf
    logp = logits.log_softmax(-1).gather(1, ids[:, None])[:, 0]
    return logp, out.hidden_states[-1][0, prompt.length - 1 :]


@dataclass
class Case:
    module: torch.nn.Module  # what the script trains
    packs: list
    sequences: list[tuple]  # arguments of unmodified_forward after the model, for each response
    run_pack: Callable  # module, pack -> results (M, ...) or (S,)
    select: Callable  # module, sequence index, log-probs, hidden states -> the same for one response


def make_trajectory(whole: Parts, prompt: packing.Prompt) -> Response:
    """Three turns with tokens of the whole vocabulary; the first observation has an image."""
    image = Image.open(whole.folder / "wide.png")
    observations = [[{"type": "image", "image": image}, {"type": "text", "text": "closer"}], "no"]
    sampler = ScriptedSampler(whole.processor.tokenizer, 0)
    sampler.turns = [
        torch.randint(600, V, (R,), generator=torch.Generator().manual_seed(R)) for R in (150, 1, 270)
    ]
    environment = type("Env", (Scripted,), {"observations": observations})
    sampler = make_sampler(whole.model, whole.processor, sampler=sampler, environment=environment)
    return sampler.generate([prompt], 1, 1.0)[0]


def policy_case(script, whole: Parts) -> Case:
    """rloo.py and ppo_vl.py: two responses to each of four prompts, with tokens of the whole vocabulary. The last
    responses to prompts 0 and 2 are trajectories."""
    questions = [("<image>What is it?", ["square"], {}), ("Is <image> like <image>?", ["wide", "small"], {})]
    questions += [("Hello.", [], {}), ("And <image> again?", ["square"], {})]
    load = lambda *x: script.PromptDataset(*x, whole.model, whole.processor)  # noqa: E731
    args, data = load_rows(script, whole, load, questions, rewards=(), reward_weights=(), temperature=0.7)
    lengths = [300, 257, 299, 40, 256, 1, 120, 300]
    responses = [torch.randint(600, V, (R,), generator=torch.Generator().manual_seed(R)) for R in lengths]
    prompts = [data.encode(i) for i in range(4)]
    masks = [torch.ones(R, dtype=torch.bool) for R in lengths]
    sequences = [(prompts[b // 2], ids, 0.7) for b, ids in enumerate(responses)]
    continuations = {}
    for b in (1, 5):
        trajectory = make_trajectory(whole, prompts[b // 2])
        continuations[b] = trajectory.continuation
        responses[b], masks[b] = trajectory.token_ids, trajectory.response_mask
        inputs = packing.extend_prompt(prompts[b // 2], trajectory.continuation).inputs
        sequences[b] = (prompts[b // 2], responses[b], 0.7, inputs)
    rollout = Parts(prompts=prompts, response_ids=responses, continuations=continuations)
    module = script.Policy(whole.model, 0.7)
    run = Parts(train_data=data, actor=Parts(module=module))
    packs = script.iter_packs(args, run, rollout, torch.arange(4), torch.ones(4, 2, dtype=torch.bool))
    select = lambda m, b, logp, hidden: logp[masks[b]]  # noqa: E731
    return Case(module, packs, sequences, lambda m, pack: m(pack)[0], select)


CASES = {rloo: policy_case, ppo_vl: policy_case}


@pytest.mark.slow
@pytest.mark.parametrize("script", CASES, ids=lambda script: script.__name__)
def test_packed_equals_unmodified(script, whole, monkeypatch):
    monkeypatch.setattr(packing, "LOGITS_CHUNK", 300)
    torch.manual_seed(1)
    whole = Parts(folder=whole.folder, model=copy.deepcopy(whole.model), processor=whole.processor)
    packing.set_attention(whole.model, "packed")
    case = CASES[script](script, whole)
    packs = list(case.packs)
    unmodified = copy.deepcopy(case.module)
    packing.set_attention(unmodified.model, "sdpa")
    expected = []
    weights = []
    for b, sequence in enumerate(case.sequences):
        x = case.select(unmodified, b, *unmodified_forward(unmodified.model, *sequence))
        weights.append(torch.randn_like(x))
        (x * weights[-1]).sum().backward()
        expected.append(x.detach())
    indices = sorted(b for pack in packs for b in pack.response_index.tolist())
    assert len(packs) > 1 and indices == [*range(len(case.sequences))]
    largest = max(len(pack.target_ids) for pack in packs)
    assert largest > 2 * packing.LOGITS_CHUNK and largest % packing.LOGITS_CHUNK  # the last chunk is shorter
    for pack in packs:
        x = case.run_pack(case.module, pack)
        y, weight = (torch.cat([table[b] for b in pack.response_index]) for table in (expected, weights))
        torch.testing.assert_close(x.detach(), y, atol=2e-4, rtol=0)
        (x * weight).sum().backward()
    computed, exact = ({name: p.grad for name, p in m.named_parameters()} for m in (case.module, unmodified))
    total = sum(float(g.norm()) ** 2 for g in exact.values() if g is not None) ** 0.5
    for name, y in exact.items():
        difference = 0.0 if y is None and computed[name] is None else (computed[name] - y).norm()
        assert difference == 0 or difference <= 1e-4 * y.norm() + 1e-6 * total, name
