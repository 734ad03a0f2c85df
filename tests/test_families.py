"""Each family gets the layout that is exact for it: log-probs, greedy responses, and two steps of rloo.py.

The models are tiny and random, with the tokenizer of assets/tiny_vl. Those in PACKED must be packed, and
those in PADDED must not. tools/families.py measures many more families.
"""

import functools
import json
import re
import tempfile
import warnings
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import av
import numpy as np
import pytest
import torch
import transformers
from conftest import ROOT, TINY, assert_same_run, continuations, metrics_of, read_jsonl, slow, write_jsonl
from PIL import Image

import grm_sft
import reward_bt
import rloo
from common import attention, chats, decoding, packing, packing_check
from tools import families

QWEN_VL = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
VISION = (*QWEN_VL, "llava", "gemma3", "idefics3", "internvl", "paligemma")
VIDEO = (*QWEN_VL, "internvl")
# One family per mechanism: M-RoPE, deepstack, image blocks, tiles, windows, learned positions, a factor of logits
PACKED = ("qwen2_5_vl", "qwen3_vl", "llava", "gemma3", "idefics3", "internvl", "paligemma", "llama")
PACKED += ("llama dynamic", "mistral", "gpt2", "granite")
# Softcaps and sinks of eager attention, RoPE that depends on the length, another interface, recurrent state
PADDED = ("gemma2", "gpt_oss", "phi3 longrope", "gptj", "qwen3_next")
FAMILIES = (*PACKED, *PADDED)
QUICK = ("qwen2_5_vl", "gemma3", "internvl", "paligemma", "llama", "gpt2", "gemma2", "gpt_oss", "qwen3_next")
TEMPERATURE = 0.7
EOS_IDS = [*range(4, 500, 8), 500]  # with these, some responses end at once, some later, some never


def load_model(source, dtype: str = "float32"):
    return rloo.load_model(rloo.Args(dtype=dtype), str(source)).eval()


def load_family(folder) -> SimpleNamespace:
    """A new copy of a family's model, its processor, and its rows as rloo.py encodes them."""
    model, processor = load_model(folder), transformers.AutoProcessor.from_pretrained(folder)
    args = rloo.Args(rewards=(), max_prompt_length=2048)
    data = rloo.PromptDataset(args, str(folder / "rows.jsonl"), "train", model, processor)
    prompts = [data.encode(i) for i in range(len(data.rows))]
    return SimpleNamespace(model=model, processor=processor, prompts=prompts)


ROPE = {"rope_type": "default", "rope_theta": 10000.0}
FACTORS = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [3.0] * 8}
TEXT = {  # what differs from the configurations of tools/families.py; short windows
    "gemma2": {"sliding_window": 8, "final_logit_softcapping": 3.0, "attn_logit_softcapping": 2.0},
    **dict.fromkeys(("gemma3", "mistral"), {"sliding_window": 8}),
    "granite": {"logits_scaling": 3.0, "attention_multiplier": 0.3, "residual_multiplier": 0.5},
    "mixtral": {"num_local_experts": 4, "router_jitter_noise": 0.5, "initializer_range": 0.3},
    "llama dynamic": {"rope_parameters": ROPE | {"rope_type": "dynamic", "factor": 4.0}},
    "phi3 longrope": {"rope_parameters": ROPE | FACTORS, "original_max_position_embeddings": 200},
}
PROCESSORS = {  # images of several tiles
    "idefics3": {"image_processor": {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}}},
    "internvl": {"image_processor": {"crop_to_patches": True, "max_patches": 4}},
}


@functools.cache
def build(family: str):
    """Model and processor, or tokenizer, of tools/families.py. EOS is also the padding token."""
    model_type = family.split()[0]
    fields = families.CONFIGS["families"].get(model_type, {}) | {"model_type": model_type}
    text = {"eos_token_id": 500, "pad_token_id": 500} | TEXT.get(family, {})
    fields |= {"text_config": fields.get("text_config", {}) | text} if family in VISION else text
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setitem(families.CONFIGS["families"], "test", fields)
        options = {"like": model_type} | PROCESSORS.get(family, {})
        patch.setitem(families.CONFIGS["processors"], "test", options)
        families.tokenizer.cache_clear()  # PaliGemma's processor adds tokens to its tokenizer
        processor = families.make_processor("test")
        families.save_model("test", processor, folder)
        model = load_model(folder)
    template = transformers.AutoProcessor.from_pretrained(TINY).chat_template
    mark = "<boi>" if family == "gemma3" else getattr(processor, "image_token", "")
    mark = f"<boi>{mark}<eoi>" if family in QWEN_VL else mark
    template = template.replace("<|vision_start|><|image_pad|><|vision_end|>", mark)
    processor.chat_template = template.replace("<|vision_start|><|video_pad|><|vision_end|>", "<video>")
    tokenizer = getattr(processor, "tokenizer", processor)
    tokenizer.init_kwargs.pop("processor_class", None)
    tokenizer._processor_class = None
    model.generation_config = transformers.GenerationConfig(eos_token_id=500, pad_token_id=500)
    return model, processor


def write_video(path, num_frames: int = 24) -> None:
    """Gray that gets lighter: 8 frames per second."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=8)
        stream.width, stream.height, stream.pix_fmt = 64, 64, "yuv420p"
        for k in range(num_frames):
            frame = np.full((64, 64, 3), 10 * k, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())


def save_family(family: str, folder) -> None:
    """Its model, its processor and a dataset for all scripts (rows.jsonl)."""
    for part in build(family):
        part.save_pretrained(folder)
    rows = [{"prompt": "What is 2 + 2?"}, {"prompt": "Say something about rivers, please."}] * 2
    if family in VISION:
        for i, size in enumerate([(64, 64, 3), (32, 64, 3), (48, 32, 3)]):
            pixels = np.random.default_rng(i).integers(0, 256, size, dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"{i}.png")
        rows[2] = {"prompt": "<image>What is it?", "images": ["0.png"]}
        rows[3] = {"prompt": "Is <image> like <image>?", "images": ["1.png", "2.png"]}
        rows += [{"prompt": "Is <image> wider?", "images": ["1.png"]}]
    if family == "paligemma":
        texts = ["<image>" + row["prompt"].replace("<image>", "the other") for row in rows]
        rows = [{"prompt": text, "images": ["2.png"]} for text in texts]
    if family in VIDEO:
        write_video(folder / "clip.mp4")
        rows += [{"prompt": "<image>, then <video>?", "images": ["2.png"], "videos": ["clip.mp4"]}]
    common = {"responses": ["Yes.", "No, it is a river.", "No"], "images": [], "videos": []}  # one a prefix
    common |= {"answer_1": "Yes.", "answer_2": "No, it is a river.", "verdict": "2"}
    rows[0] = rows[0] | {"responses": [f"{i} and {'then ' * 40}so on" for i in range(4)]}
    write_jsonl(folder / "rows.jsonl", [common | row for row in rows])


def unmodified_logprobs(model, inputs: dict, response: torch.Tensor, temperature: float):
    """Log-probs (R,) of a response by the unmodified model, on the processor's own output."""
    P, R = inputs["input_ids"].shape[1], len(response)
    inputs = {name: x for name, x in inputs.items() if name != "labels"}
    new = {"input_ids": response[None], "attention_mask": torch.ones(1, R, dtype=torch.long)}
    bidirectional_is_0 = "paligemma" in model.config.model_type
    new["token_type_ids"] = torch.full((1, R), int(bidirectional_is_0))
    new["mm_token_type_ids"] = torch.zeros(1, R, dtype=torch.long)
    inputs |= {name: torch.cat([inputs[name], x], 1) for name, x in new.items() if name in inputs}
    logits = model(**inputs).logits[0, P - 1 : P + R - 1] / temperature
    logits[:, packing.media_token_ids(model.config)] = -torch.inf
    return logits.log_softmax(-1).gather(1, response[:, None])[:, 0]


@pytest.mark.parametrize("family", [*QUICK, *slow(*(family for family in FAMILIES if family not in QUICK))])
def test_logprobs_and_greedy_responses_equal_the_unmodified_model(family, folder_of):
    batch, unmodified = load_family(folder_of(family)), load_model(folder_of(family))
    model, prompts = batch.model, [replace(prompt, seed=i) for i, prompt in enumerate(batch.prompts)]
    assert len(prompts) == 4 + (family in VISION) + (family in VIDEO)
    message = choose_layout(model, prompts, max_length=256, max_tokens=600)
    assert packing.is_packed(model) == (family in PACKED) == message.startswith("packing enabled"), message

    encode = functools.partial(chats.encode_chat, batch.processor, add_generation_prompt=True)
    inputs = [dict(encode(prompt.messages)) for prompt in prompts]
    responses = decoding.generate(model, prompts, 3, 10, EOS_IDS, TEMPERATURE, max_tokens=250)
    packed = torch.zeros(len(responses), 10)
    groups = [(i, [3 * i, 3 * i + 1, 3 * i + 2]) for i in range(len(prompts))]
    trained = continuations(groups, prompts, [response.token_ids for response in responses])
    with torch.no_grad():
        for pack in packing.iter_rank_packs(model, groups, prompts, trained, 250):
            packed[pack.token_index] = packing.response_logprobs(model, pack, TEMPERATURE)[0]
        for b, response in enumerate(responses):
            expected = unmodified_logprobs(unmodified, inputs[b // 3], response.token_ids, TEMPERATURE)
            torch.testing.assert_close(packed[b, : len(expected)], expected, atol=1e-4, rtol=0)
            torch.testing.assert_close(response.logprobs, expected, atol=1e-4, rtol=0)
            assert response.truncated == (int(response.token_ids[-1]) not in EOS_IDS)
    assert len(set(map(len, trained))) > 2

    greedy = decoding.generate(model, prompts, 1, 10, EOS_IDS, temperature=0.0, max_tokens=600)
    options = {"do_sample": False, "max_new_tokens": 10, "eos_token_id": EOS_IDS}
    options["suppress_tokens"] = packing.media_token_ids(model.config) or None
    for chat, response in zip(inputs, greedy):
        expected = unmodified.generate(**chat, **options)[0, chat["input_ids"].shape[1] :]
        assert response.token_ids.tolist() == expected.tolist()


@pytest.fixture
def on_family(folder_of, any_score):
    flags = any_score | {"eval_dataset": None, "num_epochs": 1, "train_batch_size": 16}
    return lambda family: flags | {"model": folder_of(family), "dataset": folder_of(family) / "rows.jsonl"}


@pytest.mark.parametrize("family", ["internvl", "granite", *slow("gpt2", *PADDED)])
def test_two_steps(family, on_family, run, capsys):
    steps = metrics_of(run("rloo", **on_family(family)))
    assert [step["train/step"] for step in steps] == [1, 2]
    assert abs(steps[0]["objective/kl"]) < 1e-3, "the reference has the policy's layout and factor of logits"
    for step in steps:
        assert 0 < step["train/grad_norm"] < 1e4 and step["rollout/prompts_skipped"] == 0
        assert step["sampling/logprob_diff_mean"] < 1e-4 > abs(step["policy/ratio"] - 1)
    out = capsys.readouterr().out
    assert ("warning: batches are padded" in out) == (family not in PACKED)
    # bf16's tolerance can hide a softcap, so the check must not depend on it.
    assert ("the model uses eager attention, but" in out) == (family in ("gemma2", "gpt_oss", "gptj"))


@pytest.mark.parametrize("family", ["internvl", *slow("gemma3")])
@pytest.mark.parametrize("script", [reward_bt, grm_sft], ids=["reward_bt", "grm_sft"])
def test_one_step_is_the_same_packed_and_padded(script, family, folder_of, tmp_path, monkeypatch, capsys):
    """Metrics and weights after a step on all rows."""
    folder, flags = folder_of(family), {"output_dir": str(tmp_path), "total_steps": 1}
    flags |= {"model": str(folder), "dataset": str(folder / "rows.jsonl")}
    batch = len(read_jsonl(folder / "rows.jsonl")) * (2 if script == grm_sft else 1)  # a pair is two examples
    for name in ("packed", "padded"):
        script.main(script.Args(**flags, run_name=name, train_batch_size=batch, warmup_updates=0))
        captured = capsys.readouterr()
        assert ("packing enabled" in captured.out) == (name == "packed")
        assert "skipped" not in captured.err
        monkeypatch.setattr(packing_check, "choose_layout", lambda *arguments, **keywords: "padded")
    assert_same_run(tmp_path / "packed", tmp_path / "padded", 1e-4, of_weights=1e-4)
    assert metrics_of(tmp_path / "packed")[-1]["train/grad_norm"] > 0


@pytest.mark.slow
def test_a_check_that_ends_early_leaves_no_parameters_gathered(on_family, finish, tmp_path):
    """A layer refuses packing in the middle of a forward; then ZeRO-3 must gather all weights for the sampler."""
    (tmp_path / "sitecustomize.py").write_text(
        "import common.attention as attention\n"
        "def refuse(*args, **kwargs): raise attention.ModelError('it refuses')\n"
        "attention.attend = refuse\n"
    )
    env = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    output = finish("rloo", env=env, **on_family("llama"), zero_stage=3)
    assert "packing is not supported for this model (it refuses)" in output


def choose_layout(model, prompts, forward=None, **how) -> str:
    """The message of the check at startup; prompts: one of text if there are none."""
    forward = forward or (lambda pack: packing.response_logprobs(model, pack, TEMPERATURE)[0])
    how = {"max_length": 64, "max_tokens": 128, "forward": lambda network, pack: forward(pack)} | how
    return packing_check.choose_layout(SimpleNamespace(model=model), prompts, **how)


def text_prompt(model, **how):
    ids = torch.arange(5, 30)[None]
    return packing.make_prompt(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, **how)


@pytest.mark.parametrize("family, limit", [("llama dynamic", 1024), ("phi3 longrope", 200)])
def test_rope_that_depends_on_the_length_runs_one_row_at_a_time(family, limit):
    """Beyond the limit, a long row of a batch would change the angles of all others."""
    model = build(family)[0]
    prompt = text_prompt(model)
    for max_length, is_packed in ((limit, True), (limit + 1, False)):
        packing.set_attention(model, "sdpa")
        message = choose_layout(model, [prompt], max_length=max_length, max_tokens=2 * limit)
        assert packing.is_packed(model) == is_packed
    assert f"(beyond {limit} tokens its RoPE depends on the sequence length)" in message
    for length, rows in ((9, [3]), (limit, [1, 1, 1])):
        responses = [packing.continue_prompt(prompt, torch.arange(length))] * 3
        packs = packing.iter_rank_packs(model, [(0, [0, 1, 2])], [prompt], responses, 2000)
        assert [len(pack.model_inputs["input_ids"]) for pack in packs] == rows


def test_models_run_no_code(tmp_path, refused, monkeypatch):
    (folder := tmp_path / "model").mkdir()
    config = {"model_type": "none_such", "auto_map": {"AutoConfig": "modeling.A"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "modeling.py").write_text("raise SystemError\n")
    monkeypatch.setattr("builtins.input", lambda *args: "")  # transformers would ask for permission
    with refused(f"error: can't load the model {folder}"):
        load_model(folder)


SMALL = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
SMALL |= {"vocab_size": 320}

REFUSED = {
    "no head": "1 weights are missing: ['lm_head.weight']",
    "another shape": "`ignore_mismatched_sizes`",
    "vision tower": "Unrecognized configuration class",
    "bart": "encoder-decoder models are not supported",
    "florence2": "encoder-decoder models are not supported",
}


@pytest.mark.parametrize("case", REFUSED)
def test_models_that_would_be_random_or_are_no_decoders_are_refused(case, tmp_path, refused):
    if case in ("bart", "florence2"):
        transformers.CONFIG_MAPPING[case]().save_pretrained(tmp_path)
    elif case == "vision tower":
        config = transformers.CLIPVisionConfig(**SMALL)
        transformers.CLIPVisionModel(config).save_pretrained(tmp_path)
    else:
        model = build("llava")[0]
        weights = {name: x[:4] if "q_proj" in name else x for name, x in model.state_dict().items()}
        part, weights = (model.base_model, None) if case == "no head" else (model, weights)
        part.save_pretrained(tmp_path, state_dict=weights)
    with refused(f"{tmp_path}: ", REFUSED[case]):
        load_model(tmp_path)


def test_a_bidirectional_model_is_refused_where_we_sample_and_padded_where_not(refused):
    """Its log-probs of a token depend on the tokens after it."""
    torch.manual_seed(0)
    config = transformers.BertConfig(**SMALL | {"num_hidden_layers": 2}, initializer_range=0.5)
    model = transformers.BertLMHeadModel(config).eval()
    prompts = [text_prompt(model)]
    with refused("row 0: the model's generate and its forward differ by"):
        choose_layout(model, prompts)
    message = choose_layout(model, prompts, must_generate=False)
    assert message.startswith("warning: batches are padded") and "warning: row 0: the model's gen" in message
    reward_model = reward_bt.RewardModel(model.base_model)
    assert choose_layout(reward_model.model, prompts, reward_model).startswith("warning: batches are padded")


def test_only_errors_of_the_model_lead_to_padded_batches(monkeypatch):
    """A bug in a script or a fork shows its traceback, and no memory is no reason to train slowly."""
    model = build("llama")[0]
    prompts = [text_prompt(model)]
    with pytest.raises(KeyError, match="pixel_values"):
        choose_layout(model, prompts, lambda pack: model(pack.model_inputs["pixel_values"]))
    mlp = type(model.model.layers[0].mlp)
    with monkeypatch.context() as patch:
        patch.setattr(attention, "attend", Mock(side_effect=RuntimeError("no packs, please")))
        assert "(RuntimeError: no packs, please)" in choose_layout(model, prompts)
        patch.setattr(attention, "attend", Mock(side_effect=torch.OutOfMemoryError))
        with pytest.raises(torch.OutOfMemoryError):
            choose_layout(model, prompts)
    monkeypatch.setattr(mlp, "forward", lambda self, x: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        choose_layout(model, prompts)


def test_an_image_with_as_many_patches_as_the_prompt_has_tokens():
    """Gemma 4's positions of patches then look like an input with one entry per token."""
    with torch.device("meta"):
        config = transformers.Gemma4Config(text_config=SMALL, vision_config={})
        model = transformers.Gemma4ForConditionalGeneration(config)
    inputs = {"input_ids": torch.arange(5, 35)[None], "mm_token_type_ids": torch.zeros(1, 30).long()}
    image = {"pixel_values": torch.zeros(1, 30, 8), "image_position_ids": torch.zeros(1, 30, 2)}
    prompt = packing.make_prompt(model, inputs | image)
    assert prompt.next_inputs.keys() == inputs.keys() and prompt.media_inputs.keys() == image.keys()


def test_rare_types_of_rows_are_probed(tmp_path):
    """Of 101 rows, only the 59th has an image."""
    rows = [{"prompt": "a", "images": []}] * 101
    with_image = {"prompt": "a", "images": ["x.png", "y.png"]}
    source = write_jsonl(tmp_path / "rows.jsonl", [*rows[:59], with_image, *rows[60:]])
    chosen = packing_check.choose_probe_rows(rloo.load_rows(rloo.Args(rewards=()), source, "train"))
    assert 59 in chosen and len(chosen) == 17


def test_media_that_the_check_has_not_seen_are_reported(folder_of):
    batch = load_family(folder_of("llava"))
    choose_layout(batch.model, batch.prompts[:2], max_length=128, max_tokens=256)
    responses = [packing.continue_prompt(prompt, torch.arange(5, 9)) for prompt in batch.prompts]
    arguments = batch.prompts, responses, 256
    with warnings.catch_warnings(action="error"):
        list(packing.iter_rank_packs(batch.model, [(0, [0])], *arguments))
    with pytest.warns(UserWarning, match="did not compare: pixel_values"):
        list(packing.iter_rank_packs(batch.model, [(0, [0]), (2, [2])], *arguments))


def test_lora_is_on_the_language_model_only():
    """The towers are found although these models name them differently."""
    t = transformers
    small = SMALL | {"num_key_value_heads": 2, "pad_token_id": 0}
    small["rope_parameters"] = ROPE | {"mrope_section": [2, 3, 3]}
    omni = t.CONFIG_MAPPING["qwen2_5_omni_thinker"](text_config=small, vision_config={"depth": 1})
    git = t.GitConfig(**SMALL, vision_config=SMALL)
    kosmos = t.Kosmos2Config(text_config={"layers": 1}, vision_config=SMALL)
    for config, count in ((omni, 7), (git, 6), (kosmos, 6)):
        with torch.device("meta"):
            model = t.AutoModelForImageTextToText.from_config(config)
            rloo.prepare_for_training(rloo.Args(lora_rank=2), rloo.Policy(model, 1.0))
        names = [name for name, module in model.named_modules() if hasattr(module, "lora_A")]
        words = "vis|image|audio|connector|perceiver|lm_head"
        assert len(names) == count and not re.search(words, " ".join(names))


@pytest.mark.parametrize(
    "family", ["hyperclovax (scaled logits)", "blip-2", *slow("minicpm3", "muse_glimmer")]
)
def test_scaled_logits_are_packed_and_nested_models_padded(family):
    """One multiplies, one divides hidden states, one has a multiplier and then a softcap. BLIP-2's generate
    calls that of its language model."""
    result = families.measure(family)
    assert result.path == ("padded" if family == "blip-2" else "packed")
    assert max(result.errors[key] for key in ("training", "sampling", "gradient")) < 1e-4
