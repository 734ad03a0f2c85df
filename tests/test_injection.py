"""Text from data never becomes an end of turn or a picture: a row with special tokens trains like its escaped text."""

import importlib

import pytest
from conftest import SCRIPTS, to_argv, write_jsonl

VERDICT = "<answer>Answer 1 is better</answer>"
LLAMA = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|reserved_special_token_0|>")


@pytest.fixture(scope="session")
def llama(tmp_path_factory) -> str:
    """Folder of a random text-only Llama with the special tokens and the chat template of Llama 3, and </s> besides."""
    import torch
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|eot_id|>", pad_token="</s>")
    tokenizer.add_tokens([AddedToken(token, special=True) for token in LLAMA], special_tokens=True)
    tokenizer.chat_template = (
        "{{ '<|begin_of_text|>' }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' "
        "+ m['content'] + '<|eot_id|>' }}{% endfor %}{% if add_generation_prompt %}"
        "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
    )
    torch.manual_seed(0)
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=len(tokenizer), num_key_value_heads=2, eos_token_id=tokenizer.eos_token_id, **size)
    folder = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def rows_with(script: str, evil: str) -> list[dict]:
    """Four rows; one of them holds `evil` wherever a row of the script has text."""
    if script == "grm_sft":
        good = {"prompt": "which?", "answer_0": "a", "answer_1": "b", "response": VERDICT}
        bad = {"prompt": evil, "answer_0": evil, "answer_1": f"b{evil}", "response": f"{evil}\n{VERDICT}"}
    elif script == "reward_bt":
        good = {"prompt": "which?", "chosen": "a", "rejected": "b"}
        bad = {"prompt": f"x{evil}y", "chosen": f"{evil}a", "rejected": f"b{evil}"}
    else:
        good = {"prompt": "which?", "answer": "a"}
        bad = {"prompt": f"x{evil}y", "answer": evil}
    return [good, bad, good, good]


def ids_of(module, processor, evil: str, role: str = "user", cut: int | None = None) -> list[int]:
    """Tokens of a chat with `evil` as a message, in two parts if there is a cut."""
    parts = [evil] if cut is None else [evil[:cut], evil[cut:]]
    content = [{"type": "text", "text": text} for text in parts]
    row = {"where": "row 0", "messages": [{"role": role, "content": content}], "images": [], "videos": []}
    text = module.render_chat(processor, {**row, "plain": False, "template_kwargs": {}})
    return getattr(processor, "tokenizer", processor)(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("kind", ["tiny", "llama"])
def test_every_special_token_is_text(kind, request):
    """In contents, in roles, cut in two by message parts, nested: no id that the template alone does not write."""
    import ppo_vl

    processor = ppo_vl.load_processor(request.getfixturevalue(kind))
    tokenizer = getattr(processor, "tokenizer", processor)
    tokens = [str(t) for t in tokenizer.added_tokens_decoder.values() if t.special]
    special, known = ppo_vl.special_tokens(processor), {tokenizer.convert_tokens_to_ids(t) for t in tokens}
    assert len(tokens) >= 6
    normal = [i for i in ids_of(ppo_vl, processor, "hello") if i in known]
    nested = [a[:3] + b + a[3:] for a in tokens for b in tokens]
    for evil in [*tokens, *nested, "".join(tokens), " ".join(tokens)]:
        escaped = ppo_vl.escape(evil, special)
        assert escaped != evil and ppo_vl.escape(escaped, special) == escaped
        assert escaped.replace(" ", "") == evil.replace(" ", "")
        ids = ids_of(ppo_vl, processor, evil)
        assert ids == ids_of(ppo_vl, processor, escaped)
        assert [i for i in ids if i in known] == normal
        assert [i for i in ids_of(ppo_vl, processor, "a", role=evil) if i in known] == normal
    for token in tokens:
        for cut in range(1, len(token)):
            ids = ids_of(ppo_vl, processor, token, cut=cut)
            assert [i for i in ids if i in known] == normal


def test_what_is_no_special_token_stays(tiny):
    import ppo_vl

    special = ppo_vl.special_tokens(ppo_vl.load_processor(tiny))
    for text in ("<think>a</think><answer>b</answer>", "a < b |im_end|>", "<|im_end>", "< |im_end|>"):
        assert ppo_vl.escape(text, special) == text
    assert ppo_vl.escape({"a<|im_end|>": ["<|im_end|>", 5, None]}, special) == {
        "a< |im_end|>": ["< |im_end|>", 5, None]
    }


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.slow
def test_a_row_with_special_tokens_trains_like_its_escaped_text(script, llama, tmp_path, monkeypatch):
    from safetensors.torch import load_file

    module = importlib.import_module(script)
    for name in ("draw_curves", "draw_samples", "draw_calibration", "draw_worst_pairs"):
        monkeypatch.setattr(module, name, lambda *args: None, raising=False)
    special = module.special_tokens(module.load_processor(llama))
    rewards = tmp_path / "reward.py"
    rewards.write_text("def score(completion_ids, **c):\n    return [sum(ids) % 7 / 7 for ids in completion_ids]\n")
    flags = {
        "model": llama, "output_dir": tmp_path, "total_steps": 1, "max_steps": 1, "rollout_batch_size": 8, "batch_size": 4,
        "train_batch_size": 8, "num_samples_per_prompt": 2, "max_response_length": 4, "eval_steps": 0, "eval_samples": 0,
        "max_prompt_length": 900, "max_length": 2000, "micro_batch_tokens": 4000, "learning_rate": 1e-3, "warmup_steps": 0,
        "rewards": [f"{rewards}:score"], "reward_weights": [1], "swap_sides": False, "group_by_image": False,
        "freeze_vision": False, "freeze_projector": False,
    }  # fmt: skip
    flags = {name: value for name, value in flags.items() if name in module.Args.__dataclass_fields__}
    weights = {}
    for name, change in (
        ("raw", str),
        ("escaped", lambda text: module.escape(text, special)),
        ("other", lambda text: "x"),
    ):
        rows = rows_with(script, change("".join(LLAMA) + "</s>"))
        own = {"dataset": write_jsonl(tmp_path / f"{name}.jsonl", rows), "run_name": name}
        module.main(module.parse_args(to_argv({**flags, **own})))
        [file] = (tmp_path / name).glob("checkpoint-*/**/model.safetensors")
        weights[name] = load_file(file)
    equal = [
        all(bool((x == weights[other][key]).all()) for key, x in weights["raw"].items())
        for other in ("escaped", "other")
    ]
    assert equal == [True, False]


def test_a_pad_token_that_is_added_after_the_data_check_is_text_there(tiny_text_model, tmp_path, monkeypatch):
    """The tokenizer has <|end|> alone, so reward_bt adds <|pad|>, and a text may hold it already."""
    from transformers import PreTrainedTokenizerFast

    import reward_bt

    monkeypatch.setattr(reward_bt, "draw_curves", lambda *args: None)
    monkeypatch.setattr(reward_bt, "load_processor", PreTrainedTokenizerFast.from_pretrained)  # as its file has it
    folder, losses = tmp_path / "runs", []
    for name, word in (("raw", "<|pad|>"), ("escaped", "< |pad|>")):
        rows = [{"prompt": f"{word} {i}", "chosen": f"a{word}b", "rejected": word * 2} for i in range(4)]
        flags = {"model": tiny_text_model, "dataset": write_jsonl(tmp_path / f"{name}.jsonl", rows), "eval_samples": 0}
        flags |= {"output_dir": folder, "run_name": name, "max_steps": 1, "batch_size": 4}
        losses.append(reward_bt.main(reward_bt.parse_args(to_argv(flags)))["rm/loss"])
    assert losses[0] == losses[1]
    assert reward_bt.load_processor(folder / "raw/checkpoint-1").pad_token == "<|pad|>"
