"""The command line: every flag is read and explained, invalid ones are refused; columns are renamed."""

import importlib
import re

import pytest
import tyro
from conftest import ROOT, write_jsonl
from test_consistency import blocks_of, each_script, flags_of, source_of

import rloo


def squeeze(text: str) -> str:
    return re.sub(r"[\s│]", "", text)


@each_script
def test_help_shows_every_flag_with_its_comment_and_default(script, capsys):
    module = importlib.import_module(script)
    with pytest.raises(SystemExit):
        tyro.cli(module.Args, args=["--help"], description=module.__doc__)
    output = capsys.readouterr().out
    assert squeeze(module.__doc__.splitlines()[0]) in squeeze(output)
    for name, (_, comment) in flags_of(script).items():
        entry = re.search(rf"^[│ ] --{name.replace('_', '-')}[ ,].*?(?=^[│ ] --|\Z)", output, re.S | re.M)
        assert entry and "(default:" in entry[0] and comment, name
        assert squeeze(comment) in squeeze(entry[0]), name


REFUSED = [  # flags of rloo.py or of another script; part of the message
    ({"num_samples_per_prompt": 1}, "--num-samples-per-prompt (1) must be at least 2"),
    ({"train_batch_size": 6}, "--train-batch-size (6) must be a multiple of --num-samples-per-prompt (4)"),
    ({"prompts_per_rollout": 5}, "that divides the rollout (20)"),
    ({"total_steps": 0, "eval_dataset": None}, "--total-steps 0 requires --eval-dataset"),
    ({"dtype": "bfloat16", "zero_stage": 0}, "--dtype bfloat16 requires --zero-stage 2 or 3"),
    ({"micro_batch_tokens": 100}, "--micro-batch-tokens must be at least --max-prompt-length"),
    ({"reward_weights": (1,)}, "--reward-weights must have one number for each of --rewards"),
    ({"rewards": ("format", "a.py:format"), "reward_weights": (1, 1)}, "--rewards must have different names"),
    ({"temperature": 0}, "--temperature (0.0) must be positive"),
    ({"max_turns": 2}, "--max-turns requires --environment"),
    ({"resume": "auto", "run_name": None}, "--resume auto requires --run-name"),
    ({"resume": "nowhere"}, "nowhere is not a checkpoint"),
    ({"model": "nowhere/at-all"}, "can't load the model nowhere/at-all"),
    ({"dataset": "broken.jsonl"}, "broken.jsonl (split train): "),
    ({"dataset": "no_answer.jsonl"}, "has columns prompt, but needs prompt and"),
    ({"dataset": "listed.jsonl"}, "rewards accuracy needs an answer, not ['a']"),
    ({"rewards": ("accurate",), "reward_weights": (1,)}, "must be path.py:name or one of accuracy, format"),
    ({"rewards": ("none.py:f",), "reward_weights": (1,)}, "must be path.py:name"),
    ({"rewards": ("reward.py:g",), "reward_weights": (1,)}, "does not define 'g'"),
    ({"rewards": ("reward.py:f",), "reward_weights": (1,)}, "must return a list with a number or None"),
    ({"rewards": ("reward.py:inf",), "reward_weights": (1,)}, "reward inf must not return infinity"),
    ({"rewards": ("reward.py:none",), "reward_weights": (1,)}, "all responses lack a reward"),
    ({"run_name": "taken"}, "already exists: use a different --run-name"),
    ({"eval_dataset": "nowhere"}, "can't load the dataset nowhere (split test)"),
    ({"script": "ppo_vl", "reward_clip": (1.0, 0.0)}, "--reward-clip (1.0 0.0)"),
    ({"script": "ppo_vl", "critic_model": "nowhere"}, "can't load the model nowhere"),
    ({"script": "ppo_vl", "freeze": "none"}, "--freeze none must match some parameter names, but not all"),
    ({"script": "ppo_vl", "freeze": "."}, "--freeze . must match some parameter names, but not all"),
    ({"lora_alpha": 8}, "--lora-alpha requires --lora-rank"),
    ({"freeze": "visual", "lora_rank": 2}, "--lora-rank freezes all other weights"),
    ({"script": "reward_bt", "eval_datasets": ("held.jsonl",)}, "--eval-datasets must be NAME=DATASET"),
    ({"script": "reward_bt", "eval_datasets": ("x=a.jsonl", "x=b.jsonl")}, "with different names"),
    ({"script": "reward_bt", "label_smoothing": 0.5}, "--label-smoothing (0.5) must be below 0.5"),
    ({"script": "reward_bt", "micro_batch_tokens": 100}, "must be at least twice --max-length"),
    ({"max_num_seqs": 1}, "--max-num-seqs must be at least 4, the number of samples"),
    ({"script": "grm_sft", "max_num_seqs": 0}, "--max-num-seqs (0)"),
]


@pytest.mark.parametrize("flags, words", REFUSED, ids=[words for _, words in REFUSED])
def test_invalid_input_gets_one_sentence_and_exit_code_2(run, tmp_path, flags, words, refused, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "no_answer.jsonl", [{"prompt": "Q"}])
    write_jsonl(tmp_path / "listed.jsonl", [{"prompt": "Q", "answer": ["a"]}] * 8)
    (tmp_path / "broken.jsonl").write_text("{not json")
    code = "f = lambda **columns: [1.0]\nnone = lambda texts, **columns: [None for _ in texts]\n"
    code += "inf = lambda texts, **columns: [-float('inf') for _ in texts]\n"
    (tmp_path / "reward.py").write_text(code)
    (tmp_path / "runs" / "taken").mkdir(parents=True)
    (tmp_path / "runs" / "taken" / "args.json").write_text("{}")
    with refused(f"error: {words}" if words.startswith("--") else words):
        run(**{"script": "rloo"} | flags)


@each_script
def test_every_flag_is_read_and_every_read_is_a_flag(script):
    flags = flags_of(script).keys()
    outside = source_of(script).replace(blocks_of(script)["check_args"], "")
    outside += "".join((ROOT / f"common/{name}.py").read_text() for name in ("chats", "environments"))
    assert flags - {*re.findall(r"\bargs\.(\w+)", outside)} == set()
    assert {*re.findall(r"\bargs\.(?!json)(\w+)", source_of(script))} - flags == set()


def test_a_gap_in_a_column_of_a_csv_file_changes_no_number(tmp_path):
    (tmp_path / "rows.csv").write_text("prompt,answer\nq,3\nq,\n")
    source = str(tmp_path / "rows.csv")
    rows = rloo.load_rows(rloo.Args(dataset=source), source, "train")
    assert [str(row["answer"]) for row in rows] == ["3", "None"]


def test_columns_are_renamed(tmp_path, refused):
    row = {"problem": "Q", "solution": "A", "photo": "a.png", "answer": "no"}
    source = write_jsonl(tmp_path / "rows.jsonl", [row])

    def load(*columns: str) -> dict:
        return rloo.load_rows(rloo.Args(dataset=source, columns=columns), source, "train")[0]

    pairs = "prompt=problem", "answer=solution", "image=photo"
    expected = {"prompt": "Q", "answer": "A", "image": "a.png"}  # the old answer is replaced
    assert load(*pairs) == expected
    for pair in ("prompt", "problem=problem", "=problem", "prompt=q"):
        with refused(f"--columns {pair} must be NEW=OLD; {source} has ['problem', 'solution'"):
            load(pair)
