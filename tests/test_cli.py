"""The command line: every flag is read and explained, invalid ones are refused, and importing a script does nothing."""

import importlib
import re
import subprocess
import sys

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


REFUSED = [  # those of rloo.py: test_rloo_runs.py
    ("ppo_vl", {"gamma": 2.0}, "--gamma (2.0) must be at most 1"),
    ("ppo_vl", {"reward_clip": (1.0, 0.0)}, "--reward-clip (1.0 0.0)"),
    ("ppo_vl", {"freeze": "none"}, "--freeze none matches no parameter"),
    ("ppo_vl", {"freeze": "."}, "--freeze . freezes everything"),
    ("rloo", {"lora_alpha": 8}, "--lora-alpha requires --lora-rank"),
    ("rloo", {"freeze": "visual", "lora_rank": 2}, "--lora-rank freezes all other weights"),
    ("reward_bt", {"eval_datasets": ("held.jsonl",)}, "--eval-datasets must be NAME=DATASET"),
    ("reward_bt", {"eval_datasets": ("x=a.jsonl", "x=b.jsonl")}, "with different names"),
    ("reward_bt", {"label_smoothing": 0.5}, "--label-smoothing (0.5) must be below 0.5"),
    ("reward_bt", {"micro_batch_tokens": 100}, "--micro-batch-tokens must be at least --max-length"),
    ("grm_sft", {"max_num_seqs": 0}, "--max-num-seqs (0)"),
]


@pytest.mark.parametrize("script, flags, words", REFUSED, ids=[words for *_, words in REFUSED])
def test_bad_flags_end_the_run_with_one_sentence(script, flags, words, run, refused):
    with refused(f"error: {words}" if words.startswith("--") else words):
        run(script, **flags)


@each_script
def test_every_flag_is_read_and_every_read_is_a_flag(script):
    flags = flags_of(script).keys()
    outside = source_of(script).replace(blocks_of(script)["check_args"], "")
    assert flags - {*re.findall(r"\bargs\.(\w+)", outside)} == set()
    assert {*re.findall(r"\bargs\.(?!json)(\w+)", source_of(script))} - flags == set()


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


@pytest.mark.slow
def test_scripts_accept_the_argument_that_the_deepspeed_launcher_adds():
    for words, code in ((["--local_rank=1", "--help"], 0), (["--total-steps", "-1"], 2), (["--nothing"], 2)):
        done = subprocess.run([sys.executable, "rloo.py", *words], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == code and "Traceback" not in done.stderr, done.stderr
