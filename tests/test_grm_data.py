"""grm_sft.py, data: every format's shipped file, sides and swaps, the label mask token by token, rows that begin alike."""

# ruff: noqa: E501  the tables

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, TINY, write_jsonl

import grm_sft

FILES = ROOT / "tests/data/grm"
GOOD = "<answer>Answer 1 is better</answer>"


@pytest.fixture(scope="module")
def tiny_model():
    model = grm_sft.load_model(TINY, torch.float32)
    processor = grm_sft.load_processor(TINY)
    return model, processor, grm_sft.end_token_ids(model, processor.tokenizer)


def prepare(tiny_model, source, training=True, **flags) -> dict:
    args = grm_sft.Args(**{"train_samples": 0, "max_length": 2048, **flags})
    return grm_sft.prepare_judged(args, *tiny_model, str(source), "train", training, show=False)


def words(message: dict) -> str:
    return "".join(part.get("text", f"<{part['type']}>") for part in message["content"])


# --- formats ---------------------------------------------------------------------------------------------------------

# file: (rows, noun, truths of the rows, messages of the first row, its images)
SHIPPED = {
    "pairs.jsonl": (["1", "tie", "2"], ["system: You compare images.", "user: a red ball on a blue sky\n**Image 1:**<image>**Image 2:**<image>"], ["images/cat_a.png", "images/cat_b.png"]),
    "video_pairs.jsonl": (["2"], ["user: a ball that rolls\n**Video 1:**<video>**Video 2:**<video>"], []),
    "text_pairs.jsonl": (["1", "tie"], ["user: What is 2 + 2?\nAnswer 1: 4\nAnswer 2: 5"], []),
    "scores.jsonl": ([7.0, 2.5], ["user: <image>Rate this picture from 1 to 10."], ["images/cat_a.png"]),
    "chat.jsonl": ([3.0, "2", None], ["system: You judge.", "user: <image>Good?", "assistant: <answer>8</answer>", "user: <image>And this?"], ["images/cat_a.png", "images/small.png"]),
    "imagegen_cot.json": (["1", "2"], ["system: Two images were generated", "user: **Image 1:**<image>", "user: **Image 2:**<image>"], ["images/cat_a.png", "images/cat_b.png"]),
    "omnireward.parquet": (["1", "tie", "2", "tie"], ["system: Two images were made", "system: It should be red.", "user: **Image 1:**<image>", "user: **Image 2:**<image>"], ["images/cat_a.png", "images/cat_b.png"]),
}  # fmt: skip


@pytest.mark.parametrize("name", SHIPPED)
def test_a_format_reads_its_shipped_file(name, tiny_model):
    truths, messages, images = SHIPPED[name]
    data = prepare(tiny_model, FILES / name, swap_sides=False)
    rows = [grm_sft.get_judged(data, i) for i in range(len(data["entries"]))]
    assert [row["truth"] for row in rows] == truths
    seen = [f"{m['role']}: {words(m)}" for m in rows[0]["messages"]]
    assert len(seen) == len(messages)
    assert all(text.startswith(start) for text, start in zip(seen, messages))
    assert rows[0]["images"] == images
    for number in range(len(rows)):  # pixels, positions, tokens
        sample, *_ = grm_sft.encode_entries(*tiny_model[:2], data, [number])
        assert len(sample["images"]) == len(rows[number]["images"])
        assert len(sample["videos"]) == len(rows[number]["videos"])


def test_hpdv3_shows_the_preferred_image_on_the_side_it_names(tiny_model):
    data = prepare(tiny_model, FILES / "hpdv3.json", swap_sides=False)
    assert len(data["entries"]) == 4
    for i in range(4):
        row, raw = grm_sft.get_judged(data, i), data["sources"][0]["rows"][i]
        assert row["images"][int(row["truth"]) - 1] == raw["path1"]
        assert row["answer"] == f"<answer>Image {row['truth']} is better</answer>"
        assert raw["prompt"] in words(row["messages"][0])


@pytest.mark.parametrize("source", ["easy-vqa", str(FILES / "hpdv3.json")])
def test_the_same_seed_gives_the_same_sides_and_another_does_not(source, tiny_model):
    def truths(seed):
        data = prepare(tiny_model, source, seed=seed, train_samples=40, swap_sides=False)
        return [grm_sft.get_judged(data, i)["truth"] for i in list(range(len(data["entries"]))) * 2]

    one = truths(1)
    assert one == truths(1)
    assert one[: len(one) // 2] == one[len(one) // 2 :], "a row looks the same at every access"
    assert any(one != truths(seed) for seed in (2, 3, 4))


def test_easy_vqa_judges_two_answers_of_one_kind_and_sides_are_fair(tiny_model):
    data = prepare(tiny_model, "easy-vqa", train_samples=300, swap_sides=False)
    counts = Counter()
    for i in range(300):
        row = grm_sft.get_judged(data, i)
        right = row["info"]["answer"]
        candidates = words(row["messages"][0]).split("\nAnswer ")[1:]
        first, second = (text[3:] for text in candidates)
        assert (first if row["truth"] == "1" else second) == right != (second if row["truth"] == "1" else first)
        assert any(first in kind and second in kind for kind in grm_sft.EASY_VQA_KINDS)
        assert row["answer"] == f"<think>{right}</think><answer>Answer {row['truth']} is better</answer>"
        counts[row["truth"]] += 1
    assert 120 < counts["1"] < 180


# --- verdicts and swaps ----------------------------------------------------------------------------------------------

VERDICTS = {
    "<think>x</think><answer>Image 1 is better</answer>": "1",
    "<answer> video 2  is better. </answer>": "2",
    "<answer>Answer 2 is better</answer> and so on": "2",
    "<answer>Both are equally good</answer>": "tie",
    "<answer>Both images are equally good</answer>": "tie",
    "<answer>7</answer>": 7.0,
    "<answer>-2.5</answer>": -2.5,
    "": None,
    "Image 1 is better": None,
    "<answer>Image 3 is better</answer>": None,
    "<answer>Image 1 is not better</answer>": None,
    "<answer>nan</answer>": None,
    "<answer>Image 1 is better": None,
    "<answer>Image 1 is better</answer><answer>Image 2 is better</answer>": None,
}


@pytest.mark.parametrize("text", VERDICTS)
def test_parse_verdict(text):
    assert grm_sft.parse_verdict(text) == VERDICTS[text]


@pytest.mark.parametrize("noun", ["Image", "Video", "Answer"])
@pytest.mark.parametrize("verdict", ["1", "2", "tie"])
def test_what_is_written_is_read(verdict, noun):
    assert grm_sft.parse_verdict(grm_sft.write_verdict(verdict, noun)) == verdict
    swapped = grm_sft.swap_words(grm_sft.write_verdict(verdict, noun))
    assert grm_sft.parse_verdict(swapped) == grm_sft.swap_verdict(verdict)


def test_swap_words():
    text = (
        "Image 1 (9/10), image_2 and Images 1; the First image and the second video. Video12, <answer>1 of 2</answer>"
    )
    swapped = (
        "Image 2 (9/10), image_1 and Images 1; the Second image and the first video. Video12, <answer>1 of 2</answer>"
    )
    assert grm_sft.swap_words(text) == swapped
    assert grm_sft.swap_words(swapped) == text


@pytest.mark.parametrize("name", ["pairs.jsonl", "video_pairs.jsonl", "text_pairs.jsonl", "imagegen_cot.json", "hpdv3.json", "omnireward.parquet"])  # fmt: skip # noqa: E501
def test_swapping_is_exact(name, tiny_model):
    data = prepare(tiny_model, FILES / name)
    entries = data["entries"]
    assert [entry["swap"] for entry in entries] == [False, True] * (len(entries) // 2)
    for i in range(0, len(entries), 2):
        row, swapped = grm_sft.get_judged(data, i), grm_sft.get_judged(data, i + 1)
        assert (swapped["images"], swapped["videos"]) == (row["images"][::-1], row["videos"][::-1])
        assert swapped["truth"] == grm_sft.swap_verdict(row["truth"])
        assert grm_sft.get_judged(data, i + 1, swap=True) == row
        if row["images"]:
            assert swapped["messages"] == row["messages"], "only the pictures change places"
    if name == "pairs.jsonl":
        first = grm_sft.get_judged(data, 1)
        assert first["answer"] == "<think>Image 2 shows a ball, Image 1 a box. The second image fits.</think><answer>Image 2 is better</answer>"  # fmt: skip # noqa: E501
    if name == "text_pairs.jsonl":
        assert words(grm_sft.get_judged(data, 1)["messages"][0]) == "What is 2 + 2?\nAnswer 1: 5\nAnswer 2: 4"


def test_swapped_pairs_are_for_training_and_pairs_alone(tiny_model):
    assert len(prepare(tiny_model, FILES / "pairs.jsonl", training=False)["entries"]) == 3
    assert len(prepare(tiny_model, FILES / "chat.jsonl")["entries"]) == 3
    both = prepare(tiny_model, f"{FILES / 'scores.jsonl'},{FILES / 'pairs.jsonl'}")
    assert [entry["source"] for entry in both["entries"]] == [0, 0] + [1] * 6


def test_ties_are_an_option_where_the_source_has_them(tiny_model):
    data = prepare(tiny_model, f"{FILES / 'pairs.jsonl'},{FILES / 'hpdv3.json'},{FILES / 'scores.jsonl'}")
    options = [grm_sft.get_judged(data, i)["options"] for i, e in enumerate(data["entries"]) if not e["swap"]]
    assert options == [("1", "2", "tie")] * 3 + [("1", "2")] * 4 + [()] * 2


# --- label mask ------------------------------------------------------------------------------------------------------


def trained(processor, row: dict, end_ids: list[int]) -> list[str]:
    tokenizer = getattr(processor, "tokenizer", processor)
    ids, mask = grm_sft.label_chat(processor, row, end_ids)
    assert mask.dtype == bool and len(ids) == len(mask)
    return tokenizer.convert_ids_to_tokens(ids[mask].tolist())


def chat_row(tmp_path, messages: list, images=()) -> dict:
    source = {"rows": [{"messages": messages, "images": list(images)}], "read": grm_sft.read_dialogue, "source": "chat"}
    source |= {
        "folder": FILES,
        "seed": 0,
        "system_prompt": None,
        "template_kwargs": {},
        "video_fps": 2.0,
        "options": (),
    }
    return grm_sft.read_judged(source, 0)


def say(role: str, content: str) -> dict:
    return {"role": role, "content": content}


def test_mask_of_one_turn(tmp_path, tiny_model):
    row = chat_row(tmp_path, [say("user", "what color?"), say("assistant", "<think>red</think><answer>1</answer>")])
    ids, mask = grm_sft.label_chat(tiny_model[1], row, tiny_model[2])
    tokens = tiny_model[1].tokenizer.convert_ids_to_tokens(ids.tolist())
    want = ["<think>", "red", "</think>", "<answer>", "1", "</answer>", "<|im_end|>"]
    assert [t for t, m in zip(tokens, mask) if m] == want
    assert tokens[-7:] == want, "the newline that the template writes after the EOS is left off"
    assert tokens[-10:-7] == ["<|im_start|>", "assistant", "Ċ"]


def test_mask_of_many_turns_with_system_and_pictures_between(tmp_path, tiny_model):
    messages = [
        say("system", "judge"),
        say("user", "<image>is it red?"),
        say("assistant", "yes"),
        say("user", "assistant\nno <image> is it blue?"),
        say("assistant", "no no"),
        say("user", "is it?"),
        say("assistant", "<answer>2</answer>"),
    ]
    row = chat_row(tmp_path, messages, ["images/cat_a.png", "images/small.png"])
    end = "<|im_end|>"
    want = ["yes", end, "no", "Ġno", end, "<answer>", "2", "</answer>", end]
    assert trained(tiny_model[1], row, tiny_model[2]) == want


def test_mask_does_not_depend_on_the_pad_token(tmp_path, tiny_model):
    processor = grm_sft.load_processor(TINY)
    processor.tokenizer.pad_token = processor.tokenizer.eos_token
    row = chat_row(tmp_path, [say("user", "a"), say("assistant", "yes"), say("user", "b"), say("assistant", "no")])
    assert trained(processor, row, tiny_model[2]) == ["yes", "<|im_end|>", "no", "<|im_end|>"]


def test_mask_of_a_text_model_whose_template_writes_no_eos(tmp_path, tiny_text_model):
    tokenizer = grm_sft.load_processor(tiny_text_model)  # its pad token is its EOS
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    row = chat_row(tmp_path, [say("user", "a"), say("assistant", "ok"), say("user", "b"), say("assistant", "no")])
    assert trained(tokenizer, row, [tokenizer.eos_token_id]) == ["o", "k", "n", "o", "<|end|>"]
    ids, mask = grm_sft.label_chat(tokenizer, row, [tokenizer.eos_token_id])
    assert tokenizer.decode(ids) == "user: a\nassistant: ok\nuser: b\nassistant: no<|end|>"


def test_the_eos_of_a_template_is_trained_once(tmp_path, tiny_text_model):
    tokenizer = grm_sft.load_processor(tiny_text_model)
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<|end|>\n\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"  # fmt: skip # noqa: E501
    row = chat_row(tmp_path, [say("user", "a"), say("assistant", "ok")])
    assert trained(tokenizer, row, [tokenizer.eos_token_id]) == ["o", "k", "<|end|>"]


def test_a_template_that_rewrites_earlier_turns_is_refused(tmp_path, tiny_text_model, capfd):
    tokenizer = grm_sft.load_processor(tiny_text_model)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] if loop.last else m['content'][:1] }}|{% endfor %}"
    )
    row = chat_row(tmp_path, [say("user", "a"), say("assistant", "long"), say("user", "b"), say("assistant", "no")])
    with pytest.raises(SystemExit):
        grm_sft.label_chat(tokenizer, row, [tokenizer.eos_token_id])
    assert "chat row 0: the chat template writes message 1 differently" in capfd.readouterr().err


def test_tokens_that_join_the_answer_with_the_template_are_refused(tmp_path, tiny_model, capfd):
    class Joining:
        """A tokenizer of pairs of letters: where an answer begins at an odd place, no token begins there."""

        chat_template, all_special_tokens, added_tokens_decoder, eos_token = "x", [], {}, None

        def __call__(self, text, add_special_tokens):
            return {"input_ids": [hash(text[i : i + 2]) % 1000 for i in range(0, len(text), 2)]}

        def apply_chat_template(self, messages, tokenize, add_generation_prompt):
            return "".join(m["content"] for m in messages) + ("+" if add_generation_prompt else "")

    row = chat_row(tmp_path, [say("user", "ab"), say("assistant", "+cd")])
    with pytest.raises(SystemExit):
        grm_sft.label_chat(Joining(), row, [0])
    assert "chat row 0: the tokenizer joins the ends of message 1" in capfd.readouterr().err


# --- tokens and groups -----------------------------------------------------------------------------------------------


def test_align_expanded():
    ids = np.array([1, 9, 2, 9, 8, 3])
    assert grm_sft.align_expanded(ids[[0, 1, 2, 5]], [1, 9, 9, 9, 2, 3, 4], [9], "").tolist() == [0, 1, 4, 5]
    assert grm_sft.align_expanded(ids, [1, 9, 9, 2, 9, 8, 8, 8, 3], [9, 8], "").tolist() == [0, 1, 3, 4, 5, 8]
    with pytest.raises(SystemExit):
        grm_sft.align_expanded(ids, [1, 9, 9, 5, 9, 3], [9], "row")


@pytest.mark.parametrize("name", ["chat.jsonl", "pairs.jsonl", "video_pairs.jsonl", "scores.jsonl"])
def test_prompt_and_response_are_the_processors_tokens(name, tiny_model):
    model, processor, end_ids = tiny_model
    data = prepare(tiny_model, FILES / name)
    for number, entry in enumerate(data["entries"]):
        row = grm_sft.get_judged(data, number)
        sample, prompt_mask, rests, masks = grm_sft.encode_entries(model, processor, data, [number])
        ids = torch.cat([sample["prompt_ids"], rests[0]])
        text = grm_sft.render_chat(processor, row, grm_sft.chat_of(row))
        whole = grm_sft.run_processor(processor, row, text)["input_ids"][0]
        assert ids.tolist() == whole[: len(ids)].tolist()
        assert whole[len(ids) :].tolist() == processor.tokenizer("\n")["input_ids"]
        assert len(ids) == entry["length"]
        mask = torch.cat([prompt_mask, masks[0]])
        assert ids[mask].tolist() == entry["ids"][entry["mask"]].tolist()


def test_answers_before_a_later_picture_are_trained_in_the_prompt(tiny_model):
    data = prepare(tiny_model, FILES / "chat.jsonl")
    sample, prompt_mask, rests, masks = grm_sft.encode_entries(*tiny_model[:2], data, [0])
    decode = tiny_model[1].tokenizer.decode
    assert decode(sample["prompt_ids"][prompt_mask]) == "<answer>8</answer><|im_end|>"
    assert decode(rests[0][masks[0]]) == "<think>less</think><answer>3</answer><|im_end|>"


def test_an_assistants_picture_is_shown_and_not_trained(tmp_path, tiny_model):
    parts = [{"type": "text", "text": "yes"}, {"type": "image", "text": None}, {"type": "text", "text": "no"}]
    asked, more = [{"type": "text", "text": "which?"}], [{"type": "text", "text": "so?"}]
    turns = [("user", asked), ("assistant", parts), ("user", more), ("assistant", [{"type": "text", "text": GOOD}])]
    row = {"messages": [{"role": role, "content": content} for role, content in turns]}
    data = prepare(tiny_model, write_jsonl(tmp_path / "a.jsonl", [row | {"images": [str(FILES / "images/cat_a.png")]}]))
    sample, prompt_mask, rests, masks = grm_sft.encode_entries(*tiny_model[:2], data, [0])
    decode = tiny_model[1].tokenizer.decode
    assert (len(sample["images"]), decode(sample["prompt_ids"][prompt_mask])) == (1, "yes")
    assert decode(rests[0][masks[0]]) == f"no<|im_end|>{GOOD}<|im_end|>"


def test_rows_of_one_picture_share_their_beginning(tiny_model):
    flags = {"train_samples": 200, "seed": 1}
    data, apart = (
        prepare(tiny_model, "easy-vqa", **flags),
        prepare(tiny_model, "easy-vqa", group_by_image=False, **flags),
    )
    assert len(apart["groups"]) == len(apart["entries"]) == len(data["entries"]) == 400
    assert sorted(i for group in data["groups"] for i in group) == list(range(400))
    pictures = {grm_sft.get_judged(data, group[0])["images"][0] for group in data["groups"]}
    assert len(pictures) == len(data["groups"]) < 200
    group = max(data["groups"], key=len)
    sample, prompt_mask, rests, masks = grm_sft.encode_entries(*tiny_model[:2], data, group)
    assert len(sample["images"]) == 1 and not prompt_mask.any()
    for number, rest, mask in zip(group, rests, masks):
        alone, _, (own_rest,), (own_mask,) = grm_sft.encode_entries(*tiny_model[:2], apart, [number])
        assert torch.equal(torch.cat([sample["prompt_ids"], rest]), torch.cat([alone["prompt_ids"], own_rest]))
        assert rest[mask].tolist() == own_rest[own_mask].tolist()


def test_an_epoch_sees_every_row_once_in_an_order_of_its_own():
    groups = [[0, 1, 2], [3], [4, 5], [6]]
    epochs = [grm_sft.batch_entries(7 * e, 7, groups, seed=1) for e in range(4)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    assert grm_sft.batch_entries(5, 4, groups, seed=1) == epochs[0][5:] + epochs[1][:2]
    assert (
        grm_sft.batch_entries(0, 7, groups, seed=2) != epochs[0]
        or grm_sft.batch_entries(0, 7, groups, seed=3) != epochs[0]
    )


def test_too_long_rows_are_dropped_and_counted_or_an_error(tiny_model, tmp_path, capfd):
    rows = [
        {"prompt": "a" * n, "response": "<answer>Answer 1 is better</answer>", "answer_0": "b", "answer_1": "c"}
        for n in (5, 900)
    ]
    source = write_jsonl(tmp_path / "rows.jsonl", rows)
    data = prepare(tiny_model, source, max_length=300)
    assert (len(data["entries"]), data["dropped"]) == (2, 2)
    with pytest.raises(SystemExit):
        prepare(tiny_model, source, max_length=300, overlong="error")
    assert "row 1 has" in capfd.readouterr().err
    assert Path(source).exists()
