"""One name for one thing, and plain English: old names and awkward words must not come back.

Each failure lists file:line, the word and what to write instead. `pytest tests/test_language.py -k rloo.py` checks
one file. Markdown pages are checked as soon as FILES has a pattern for them: outside of code blocks, all their text
is prose.
"""

import fnmatch
import io
import re
import subprocess
import tokenize
from functools import cache

import pytest
from conftest import ROOT

FILES = [
    "README.md",
    "docs/*.md",
    "assets/*/*.md",
    "*.py",
    "common/*.py",
    "examples/*.py",
    "tools/*.py",
    "tools/*.sh",
    "tests/*.py",
    ".ci/run",
]
NOT_CHECKED = {"tests/test_language.py"}

# "old: new". Not allowed anywhere, not even in a comment or a string. An underscore also matches a hyphen, so that
# flags are covered: num_iterations is --num-iterations, too.
NAMES = """
ModelSampler: HFSampler
VllmSampler: VLLMSampler
vllm_gpu_memory: vllm_gpu_memory_utilization
roll_out: collect_rollout
roll_out_useful_prompts: dynamic sampling
sampler_is_exact: reuse_sampler_logprobs
engine_logprob_diff_max: sampling/logprob_diff_mean
logprob_diff_max: sampling/logprob_diff_mean
zero_std_groups_frac: frac_reward_zero_std
prompts_dropped: prompts_skipped (RL), rows_skipped (reward_bt.py, grm_sft.py)
pass_at_k: eval/pass@8, with the real number
eval_samples: eval_prompts (RL), eval_rows (reward_bt.py, grm_sft.py), eval_records
num_iterations: num_epochs
num_ppo_epochs: num_epochs
trained_mask: loss_mask
policy_mask: policy_loss_mask
sample_mask: kept_responses
segment_ids: response_of_token
plug_in: load_callable
name_of: write it inline
batch_indices: shuffled_indices
sample_indices: shuffled_indices
set_checkpointing: set_gradient_checkpointing
add_markers: read_chat
sum_over_ranks: all_reduce_sum
mean_over_ranks: all_reduce_mean
goes_on: unfinished
to_messages: build_messages
open_media: load_media
defuse: escape_special_tokens
messages_of: get_messages
to_show: format_sample
load_data: load_prompts
packs_of: iter_packs
make_policies: load_policy_and_reference
make_engine: init_deepspeed_engine
merged_weights: iter_full_weights
find_run: resolve_run_dir
open_folder: prepare_run_dir
some_rows: probe_rows
time_asked: time_logprobs
time_begin: run_start
time_start: step_start
no_bar: show_bar
media_of: collect_media
token_inputs: per_token_inputs
next_inputs: next_token_inputs
unpackable: unsupported_inputs
predict_from: logit_indices
packs_of_rank: iter_rank_packs
plain_pack: build_unpacked
generate_plain: generate_unpacked
packing_gap: packing_error
_length_of_fixed_angles: _max_static_rope_length
_extended: _extend_by_one_token
_per_token: _per_token_input
after_head: logit_scale_and_softcap
_to_model: _to_device
KEPT_LOGPROBS: MAX_CACHED_LOGITS
RoomyLayer: BlockGrowingCacheLayer
cu_q: cu_seqlens_q
cu_k: cu_seqlens_k
max_q: max_seqlen_q
max_k: max_seqlen_k
CannotPack: PackingNotSupported
switch_attention: set_attention
center_scores: compute_outcome_advantages
keep_scores: compute_outcome_advantages
weigh_gradients: policy_weight
policy_scale: policy_weight
run_actor: needs_actor
update_average: update_ema
ema_beta: ema_decay
freezing_actor_steps: critic_warmup_steps
load_turns: examples/ptx.py
backward_of_turns: examples/ptx.py
updates_taken: update_ok
is_hopeless: diverged
"""
# "old: new". Not allowed as an identifier of the code; in comments and strings they are ordinary words.
IDENTIFIERS = """
Data: PromptDataset
Groups: PromptGroups
Medium: MediaItem
Place: LogicalIndex
NEVER: MASKED_LOGIT
ROOM: CACHE_BLOCK
CHUNK: LOGITS_CHUNK
ENCODERS: FEATURE_METHODS
tell: print0
told: message
shown: postfix
infos: prompt_infos
logged: reward_metrics
signals: received_signals
samples: sample_records, eval_records
draws: uniforms
drawn: uniform
cut: truncated
entry: index
entries: indices
owner: response_of_token, prompt_of_response
members: response_indices
gap: logprob_diff, reward_diff
goodness: eval_score
kind: type, name or key
kinds: media_keys; types, names or keys
ours: the noun itself
own: the noun itself
more: the noun itself
found: the noun itself
given: the noun itself
made: the noun itself
"""
# Regular expressions, for names that are too general to be forbidden alone.
PATTERNS = {
    r"--rollout(?![-\w])|[\"']rollout[\"']:": "--sampler",
    r"sampler\.sync\(|def sync\(": "update_weights",
    r"sampler\.sample\(|def sample\(self": "generate",
    r"rollout\.mask\b": "rollout.response_mask",
    r"rollout\.trained\b": "rollout.kept_responses",
    r"rollout\.logprobs\b": "rollout.old_logprobs",
    r"(?<!\w)run\.folder\b": "run.run_dir",
    r"rm/margin": "rm/reward_diff",
    r"\[\"before\"\]": 'state["initial_eval"]',
    r"client_state\[\"(ours|trainer_state)\"\]": 'client_state["run_state"]',
    r"(\ndef |rloo\.|ppo_vl\.)accuracy\(": "accuracy_reward",
    r"args\.dual_clip\b|--dual-clip(?!-)": "dual_clip_coef",
    r"(\ndef |rloo\.|ppo_vl\.)gather\(": "all_gather_list",
    r"(?<!\w)checkpoints\(": "list_checkpoints",
    r"pack\.(owner|targets|last|inputs|tokens|responses)\b": "see common/packing.py",
    r"decoder\.(remember|keep|seen|attend)\b": "store_prompt_kv, select, step_mask, attention",
    r"layout\.(own|order)\b": "seq_positions, unpermute",
    r"[Pp]rompt\.(ids|positions|kinds)\b|[Rr]esponse\.ids\b": "input_ids, position_ids, media_keys, token_ids",
    r"(?<![a-zA-Z])[Pp]ictures?(?![a-zA-Z])": "image",
}
# Words to avoid in comments, docstrings, help and messages. A space also matches a line break.
WORDS = {
    r"V words|words of (a|the) vocabulary": "tokens, vocabulary size V",
    r"of (its|their) own": "separate",
    r"draws|drawn": "sampled; uniforms",
    r"cuts?": "truncated",
    r"left out|taken|asked for": "skipped, consumed, requested",
    r"go(es)? on|going on": "resume, continue",
    r"places?": "index, position, placeholder, slot",
    r"proof|prove[sd]?": "check, verified, verify",
    r"asked again": "recomputed",
    r"plain path": "unpacked path",
    r"held out": "held-out, as an adjective; evaluation set",
    r"told|tells|says": "message, prints, reports",
    r"stands|lies|belongs": "is",
    r"engines?": "DeepSpeed engine, vLLM engine: always with its name",
    r"kinds?": "type, name, key",
    r"so many": "N",
    r"but for": "except",
    r"besides": "also",
    r"behind": "after",
    r"\w*colour\w*|\w*normalis\w*|learnt|\w*behaviour\w*|\w*favour\w*|\w*neighbour\w*|licence|labelled": "American spelling",
}
# Phrases of the field that contain one of these words.
PHRASES = {
    r"(DeepSpeed|vLLM)('s)? engines?": "with its name",
    r"in place": "PyTorch's term for changing a tensor itself",
}
# (file, word as printed): why it is right there.
EXCEPTIONS = {
    ("docs/rloo.md", "num_iterations"): "a field of TRL's RLOOConfig",
    ("docs/ppo_vl.md", "ema_beta"): "a parameter of LightRFT's PPOTrainerVL",
    ("docs/ppo_vl.md", "freezing_actor_steps"): "a parameter of LightRFT's PPOTrainerVL",
    ("tools/bench_trl.py", "num_iterations"): "an argument of TRL's RLOOConfig",
    ("tools/bench_learning.py", "num_iterations"): "an argument of TRL's RLOOConfig",
    ("tests/test_pretended_gpu.py", "engine"): "the file of a DeepSpeed function",
    ("examples/spelling_pairs.py", "picture"): "a word of the sentences",
    ("tools/make_tiny_vl.py", "picture"): "in the text that the tokenizer is trained on",
}


def pairs(table: str) -> dict[str, str]:
    return dict(line.split(": ", 1) for line in table.strip().splitlines())


NEW_NAMES, NEW_IDENTIFIERS = pairs(NAMES), pairs(IDENTIFIERS)


def words(patterns) -> re.Pattern:
    """One of the patterns as a whole word; hyphens join words. A space also matches a line break in a comment."""
    pattern = "|".join(patterns).replace(" ", r"[\s#]+")
    return re.compile(rf"(?<!\w)(?<!\w-)(?:{pattern})(?!\w)(?!-\w)", re.IGNORECASE)


ANY_WORD, ANY_PHRASE, ANY_PATTERN = words(WORDS), words(PHRASES), re.compile("|".join(PATTERNS))


def blank(match: re.Match) -> str:
    """The text with all characters but white space replaced, so that lines stay."""
    return re.sub(r"\S", "\0", match[0])


def split_python(source: str) -> tuple[list[tuple[int, str]], list[tuple[int, str]]]:
    """Prose and identifiers of a Python file, each with its first line.

    Prose is comments and strings that contain a space; the others are names of files, columns and the like.
    """
    prose, identifiers = [], []
    last_comment = -1  # line
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        token_type, line = tokenize.tok_name[token.type], token.start[0]
        if token_type == "COMMENT" and last_comment == line - 1:
            prose[-1] = prose[-1][0], f"{prose[-1][1]}\n{token.string}"
        elif token_type == "COMMENT" or (token_type in ("STRING", "FSTRING_MIDDLE") and " " in token.string):
            prose.append((line, token.string))
        elif token_type == "NAME":
            identifiers.append((line, token.string))
        last_comment = line if token_type == "COMMENT" else last_comment
    return prose, identifiers


def split_markdown(text: str) -> list[tuple[int, str]]:
    """The page without its code blocks and inline code."""
    return [(1, re.sub(r"(?ms)^```.*?^```$|`[^`\n]*`", blank, text))]


def split_shell(source: str) -> list[tuple[int, str]]:
    return [(1, re.sub(r"(?m)^[^#\n]+", blank, source))]


@cache
def paths() -> list[str]:
    command = ["git", "ls-files", "-co", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    names = listed.stdout.split() or [str(path.relative_to(ROOT)) for p in FILES for path in ROOT.glob(p)]
    # fnmatch's * also matches a slash, but the scripts are those of the top folder
    known = {n for n in names for p in FILES if fnmatch.fnmatch(n, p) and n.count("/") == p.count("/")}
    return sorted(name for name in known - NOT_CHECKED if (ROOT / name).is_file())


def replacement(name: str, rules: dict[str, str]) -> str:
    """What the first rule that matches says."""
    return next(new for pattern, new in rules.items() if words([pattern]).fullmatch(name))


def old_names(path: str, text: str) -> list[tuple[int, str, str]]:
    """(line, name, new name) of old identifiers, flags and metric names."""
    results = []
    for number, line in enumerate(text.splitlines(), 1):
        for name in re.findall(r"\w[\w-]*", line):
            if name.replace("-", "_") in NEW_NAMES:
                results.append((number, name, NEW_NAMES[name.replace("-", "_")]))
        for match in ANY_PATTERN.finditer(line):
            rule = next(
                new for pattern, new in PATTERNS.items() if re.compile(pattern).match(line, match.start())
            )
            results.append((number, match[0], rule))
    if path.endswith(".py"):
        _, identifiers = split_python(text)
        allowed = {"given"} if "from hypothesis import" in text else set()
        names = NEW_IDENTIFIERS.keys() - allowed
        results += [(n, name, NEW_IDENTIFIERS[name]) for n, name in identifiers if name in names]
    return results


def old_words(path: str, text: str) -> list[tuple[int, str, str]]:
    """(line, word, better word) of awkward words in comments, docstrings, help and messages."""
    if path.endswith(".py"):
        prose, _ = split_python(text)
    else:
        prose = split_markdown(text) if path.endswith(".md") else split_shell(text)
    results = []
    for first_line, part in prose:
        part = ANY_PHRASE.sub(blank, part)
        for match in ANY_WORD.finditer(part):
            name = re.sub(r"[\s#]+", " ", match[0])
            results.append((first_line + part.count("\n", 0, match.start()), name, replacement(name, WORDS)))
    return results


@pytest.mark.parametrize("path", paths())
def test_names_and_words(path):
    text = (ROOT / path).read_text()
    results = sorted({*old_names(path, text), *old_words(path, text)})
    lines = [f"{path}:{n}: {old!r} -> {new}" for n, old, new in results if (path, old) not in EXCEPTIONS]
    if lines:
        pytest.fail("\n".join(lines), pytrace=False)


def test_the_checks_themselves():
    source = 'cut = "cut"  # it goes\n# on, in place\ny = "in its place"\n"""A vLLM engine,\nan engine."""\n'
    _, identifiers = split_python(source)
    assert identifiers == [(1, "cut"), (3, "y")]
    words = [(1, "goes on"), (3, "place"), (5, "engine")]
    assert [(n, old) for n, old, _ in old_words("x.py", source)] == words
    page = "a `cut` cut\n```bash\ncut\n```\ncut\n"
    assert [n for n, _, _ in old_words("x.md", page)] == [1, 5]
    command = "f --num-iterations 2 --rollout vllm --rollout-batch-size 8 --no-x=roll_out"
    assert [old for _, old, _ in old_names("x.sh", command)] == ["num-iterations", "roll_out", "--rollout"]
    assert [new for _, _, new in old_names("x.py", "cut = 1  # own")] == ["truncated"]
