"""One name for one thing, and plain American English: old names and spellings must not come back.

Each failure lists file:line, the word and what to write instead. `pytest tests/test_language.py -k rloo.py` checks
one file. Code blocks and inline code of pages are no prose, and their tables may compare our names with those of
other libraries or of older versions.
"""

import fnmatch
import io
import re
import subprocess
import tokenize
from functools import cache

import pytest
from conftest import ROOT

FILES = "README.md docs/*.md forks/*.md assets/*/*.md *.py common/*.py examples/*.py tools/*.py tools/*.sh tests/*.py .ci/run"
NOT_CHECKED = {"tests/test_language.py"}
COMPARISONS = {"docs/trl.md", "docs/lightrft.md", "docs/upgrading.md"}  # pages about other names
# "old: new". Not allowed anywhere, not even in a comment or a string. An underscore also matches a hyphen, so that
# flags are covered.
NAMES = """
rollout_batch_size: prompts_per_rollout, which counts prompts
generation_batch_size: max_num_seqs
warmup_steps: warmup_updates
enable_packing_if_exact: packing_check.choose_layout
unpacked_inputs: Prompt.inputs
build_unpacked: build_padded
generate_unpacked: generate_padded
load_prompts: PromptDataset
outcome_scores: scores
rlhf_rewards: penalized_rewards
zero_std: scores_differ
group_norm: GRPO, a fork
reinforce_baseline: REINFORCE++, a fork
image_0: image_1, as in verdict 1
video_0: video_1, as in verdict 1
sampler_is_exact: sampling/logprob_diff_mean
segment_ids: response_of_token
packs_of: iter_packs
"""
# Regular expressions, for names that are too general to be forbidden alone.
PATTERNS = {
    r"(rollout|[Rr]esponse|[Cc]ontinuation|observation)\.loss_mask": "response_mask",
    r"[\"'`]val/": "value/",
    r"rollout\.mask\b": "rollout.response_mask",
    r"rm/margin\b": "rm/reward_diff",
}
# Words to avoid in comments, docstrings, help, messages and pages. A space also matches a line break.
WORDS = {
    r"\w*colour\w*|\w*normalis\w*|learnt|\w*behaviour\w*|\w*favour\w*|\w*neighbour\w*|licence|labelled|\w*optimis\w*": "American spelling",
    r"unpacked": "padded, or name the model that is not packed",
    r"plain path|V words|asked again|so many|but for": "the term of the field, or a full sentence",
    r"proof|prove[sd]?": "check, verify",
    r"blazing\w*|seamless\w*|effortless\w*|state-of-the-art|cutting-edge": "what was measured",
}
# (file, word as printed): why it is right there.
EXCEPTIONS = {("tools/bench.py", "warmup_steps"): "an argument of TRL's RLOOConfig"}


NEW_NAMES = dict(line.split(": ", 1) for line in NAMES.strip().splitlines())


def as_words(pattern: str) -> re.Pattern:
    """The pattern as a whole word; hyphens join words. A space also matches a line break in a comment."""
    pattern = pattern.replace(" ", r"[\s#]+")
    return re.compile(rf"(?<!\w)(?<!\w-)(?:{pattern})(?!\w)(?!-\w)", re.IGNORECASE)


def prose_of_python(source: str) -> list[tuple[int, str]]:
    """Comments and strings that contain a space, each with its first line. Other strings are names of files,
    columns and the like."""
    prose = []
    last_comment = -1  # line
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        token_type, line = tokenize.tok_name[token.type], token.start[0]
        if token_type == "COMMENT" and last_comment == line - 1:
            prose[-1] = prose[-1][0], f"{prose[-1][1]}\n{token.string}"
        elif token_type == "COMMENT" or (token_type in ("STRING", "FSTRING_MIDDLE") and " " in token.string):
            prose.append((line, token.string))
        last_comment = line if token_type == "COMMENT" else last_comment
    return prose


def blank(match: re.Match) -> str:
    """The text with all characters but white space replaced, so that lines stay."""
    return re.sub(r"\S", "\0", match[0])


def problems(path: str, text: str) -> list[tuple[int, str, str]]:
    """(line, old, new) of old names anywhere, and of words to avoid in prose."""
    results = []
    if path.endswith(".py"):
        prose = prose_of_python(text)
    elif path.endswith(".md"):
        text = re.sub(r"(?m)^\|.*", blank, text)
        prose = [(1, re.sub(r"(?ms)^```.*?^```$|`[^`\n]*`", blank, text))]
    else:
        prose = [(1, re.sub(r"(?m)^[^#\n]+", blank, text))]
    for number, line in enumerate(text.splitlines() if path not in COMPARISONS else (), 1):
        for name in re.findall(r"\w[\w-]*", line):
            if new := NEW_NAMES.get(name.replace("-", "_")):
                results.append((number, name, new))
        results += [(number, m[0], new) for x, new in PATTERNS.items() for m in re.finditer(x, line)]
    for first_line, part in prose:
        for pattern, better in WORDS.items():
            for match in as_words(pattern).finditer(part):
                number = first_line + part.count("\n", 0, match.start())
                results.append((number, re.sub(r"[\s#]+", " ", match[0]), better))
    return sorted({result for result in results if (path, result[1]) not in EXCEPTIONS})


@cache
def paths() -> list[str]:
    command = ["git", "ls-files", "-co", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    names = listed.stdout.split() or [str(x.relative_to(ROOT)) for p in FILES.split() for x in ROOT.glob(p)]
    # fnmatch's * also matches a slash, but the scripts are those of the top folder
    found = [(n, p) for n in names for p in FILES.split() if n.count("/") == p.count("/")]
    known = {name for name, pattern in found if fnmatch.fnmatch(name, pattern)}
    return sorted(name for name in known - NOT_CHECKED if (ROOT / name).is_file())


@pytest.mark.parametrize("path", paths())
def test_names_and_words(path):
    lines = [f"{path}:{n}: {old!r} -> {new}" for n, old, new in problems(path, (ROOT / path).read_text())]
    if lines:
        pytest.fail("\n".join(lines), pytrace=False)


def test_the_checks_themselves():
    source = 'x = "colour"  # a colour\n# but\n# for\n"""is unpacked,\nlicence."""\nf(warmup_steps)\n'
    found = [(1, "colour"), (2, "but for"), (4, "unpacked"), (5, "licence"), (6, "warmup_steps")]
    assert [(n, old) for n, old, _ in problems("x.py", source)] == found
    page = "a `learnt` learnt\n```bash\nf --warmup-steps 2\n```\n| `warmup_steps` |\nlearnt `val/x`\n"
    found = [(1, "learnt"), (3, "warmup-steps"), (6, "`val/"), (6, "learnt")]
    assert [(n, old) for n, old, _ in problems("x.md", page)] == found
