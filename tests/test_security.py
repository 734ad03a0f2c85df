"""Weights, configs, data and servers bring no code with them: only files that the user names as code are executed."""

import ast
import importlib
import json
import pickle
import shutil
from pathlib import Path

import pytest
from conftest import ROOT, SCRIPTS, TINY, to_argv, write_jsonl
from test_bad_input import assert_one_sentence
from test_faults import row_of, run_flags

SOURCES = [*(ROOT / f"{name}.py" for name in SCRIPTS), *sorted((ROOT / "common").glob("*.py"))]
each_source = pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)


def calls(source: Path) -> list[tuple[str, dict[str, str], str]]:
    """Called name, keywords as source text, and the top-level function around it."""
    found = []
    for top in ast.parse(source.read_text()).body:
        for node in ast.walk(top):
            if isinstance(node, ast.Call):
                keywords = {str(word.arg): ast.unparse(word.value) for word in node.keywords}
                found.append((ast.unparse(node.func), keywords, getattr(top, "name", "")))
    return found


@each_source
def test_no_code_of_a_model_is_trusted(source):
    """Said, not left out: transformers would ask at the terminal, on every rank."""
    asked = [c for c in calls(source) if c[0].endswith(".from_pretrained") and "dtype" not in c[1]]
    assert all(keywords.get("trust_remote_code") == "False" for _, keywords, _ in asked)
    assert "trust_remote_code" not in source.read_text().replace("trust_remote_code=False", "")


@each_source
def test_weights_are_read_from_safetensors_alone(source):
    models = [call for call in calls(source) if call[0].endswith(".from_pretrained")]
    weights = [call for call in models if "dtype" in call[1]]
    assert weights or source.stem not in SCRIPTS
    assert all(keywords["use_safetensors"] == "True" for _, keywords, _ in weights)
    assert {name.split(".")[0] for name, keywords, _ in models if "dtype" not in keywords} <= {
        *("AutoConfig", "AutoTokenizer", "(AutoProcessor if has_vision else AutoTokenizer)")
    }


@each_source
def test_nothing_is_unpickled_or_executed_unseen(source):
    names = [(name, around) for name, _, around in calls(source)]
    forbidden = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "pickle.load", "pickle.loads"}
    assert [pair for pair in names if pair[0] in forbidden or pair[0].startswith("subprocess.")] == []
    modules = [around for name, around in names if name.endswith("exec_module")]
    assert modules in ([], ["load_reward_fn"])
    loads = [(keywords, around) for name, keywords, around in calls(source) if name == "torch.load"]
    assert [around for keywords, around in loads if keywords.get("weights_only") == "False"] == []


class Marker:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def pickled_model(tmp: Path, source: str) -> Path:
    """A model's folder whose weights lie in a pickle, as torch.save writes it, that creates tmp/executed."""
    folder = tmp / "model"
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Marker(tmp / "executed")))
    return folder


def test_the_pickle_of_these_tests_is_dangerous(tmp_path):
    pickle.loads(pickle.dumps(Marker(tmp_path / "executed")))
    assert (tmp_path / "executed").exists()


def stopped_run(script: str, flags: dict, capfd, words: list[str]) -> None:
    module = importlib.import_module(script)
    with pytest.raises(SystemExit) as stopped:
        module.main(module.parse_args(to_argv(flags)))
    assert stopped.value.code == 2
    assert_one_sentence(capfd.readouterr().err, words)


@pytest.mark.parametrize("script", SCRIPTS)
def test_pickled_weights_are_refused(script, tmp_path, capfd):
    folder = pickled_model(tmp_path, TINY)
    flags = run_flags(script, tmp_path, str(folder)) | {
        "dataset": write_jsonl(tmp_path / "a.jsonl", [row_of(script)] * 4)
    }
    stopped_run(script, flags, capfd, ["--model", "safetensors"])
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("script", ["ppo_vl", "rloo"])
@pytest.mark.parametrize("flag", ["rewards", "critic_model"])
def test_pickled_weights_of_other_models_are_refused(script, flag, tiny_text_model, tmp_path, capfd):
    if script == "rloo" and flag == "critic_model":
        pytest.skip("no critic")
    folder = pickled_model(tmp_path, tiny_text_model)
    if flag == "rewards":
        config = json.loads((folder / "config.json").read_text())
        config |= {"architectures": ["Qwen2ForSequenceClassification"], "id2label": {"0": "a"}, "label2id": {"a": 0}}
        (folder / "config.json").write_text(json.dumps(config))
    flags = run_flags(script, tmp_path, tiny_text_model)
    flags |= {"dataset": write_jsonl(tmp_path / "a.jsonl", [row_of(script)] * 4), flag: folder}
    stopped_run(script, flags, capfd, [str(folder), "safetensors"])
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("script", SCRIPTS)
def test_code_beside_a_model_is_not_executed(script, tiny_text_model, tmp_path, capfd, monkeypatch):
    """A folder whose config asks for a class in its own modeling.py."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_text_model, folder)
    (folder / "modeling.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\nclass A: pass\n")
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "none_such"}
    config["auto_map"] = {"AutoConfig": "modeling.A", "AutoModelForCausalLM": "modeling.A"}
    (folder / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("builtins.input", lambda *args: pytest.fail("asked whether to run it"))
    flags = run_flags(script, tmp_path, str(folder)) | {
        "dataset": write_jsonl(tmp_path / "a.jsonl", [row_of(script)] * 4)
    }
    stopped_run(script, flags, capfd, ["--model"])
    assert not (tmp_path / "executed").exists()
