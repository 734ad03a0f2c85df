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
NOT_CHECKED = {"tests/test_language.py", "docs/forking.md", "docs/ppo_vl.md"}

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
batch_indices: sample_indices
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
rm/margin: rm/reward_diff
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
    r"run\.folder\b": "run.run_dir",
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
    ("docs/ppo_vl.md", "dual_clip"): "a value of --policy-loss",
    ("tools/bench_trl.py", "num_iterations"): "an argument of TRL's RLOOConfig",
    ("tools/bench_learning.py", "num_iterations"): "an argument of TRL's RLOOConfig",
    ("examples/spelling_pairs.py", "picture"): "a word of the sentences",
    ("tools/make_tiny_vl.py", "picture"): "in the text that the tokenizer is trained on",
}


def pairs(table: str) -> dict[str, str]:
    return dict(line.split(": ", 1) for line in table.strip().splitlines())


def word(pattern: str) -> str:
    """The pattern as a whole word; hyphens join words. A space also matches a line break within a comment."""
    return rf"(?<!\w)(?<!\w-)(?:{pattern})(?!\w)(?!-\w)".replace(" ", r"[\s#]+")


def blank(text: str) -> str:
    """The text with all characters but white space replaced, so that offsets and lines stay."""
    return re.sub(r"\S", "\0", text)


def split_python(source: str) -> tuple[str, str]:
    """The source with all but its prose blanked, and with all but its identifiers blanked.

    Prose is comments and strings that contain a space; the others are names of files, columns and the like.
    """
    starts = [0, *(match.end() for match in re.finditer("\n", source))]  # offset of each line
    prose, identifiers = list(blank(source)), list(blank(source))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        start, end = (starts[row - 1] + column for row, column in (token.start, token.end))
        name = tokenize.tok_name[token.type]
        if name == "COMMENT" or (name in ("STRING", "FSTRING_MIDDLE") and " " in token.string):
            prose[start:end] = source[start:end]
        elif name == "NAME":
            identifiers[start:end] = source[start:end]
    return "".join(prose), "".join(identifiers)


def split_markdown(text: str) -> str:
    """The page without its code blocks and inline code."""
    return re.sub(r"(?ms)^```.*?^```$|`[^`\n]*`", lambda match: blank(match[0]), text)


def split_shell(source: str) -> str:
    return re.sub(r"(?m)^([^#\n]*?)(#.*)?$", lambda match: blank(match[1]) + (match[2] or ""), source)


@cache
def paths() -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    names = listed.stdout.split() or [str(path.relative_to(ROOT)) for p in FILES for path in ROOT.glob(p)]
    # fnmatch's * also matches a slash, but the scripts are those of the top folder
    known = {n for n in names for p in FILES if fnmatch.fnmatch(n, p) and n.count("/") == p.count("/")}
    return sorted(name for name in known - NOT_CHECKED if (ROOT / name).is_file())


def offenses(path: str, text: str, rules: dict[str, str], flags: int = 0) -> list[str]:
    lines = []
    for pattern, instead in rules.items():
        for match in re.finditer(pattern, text, flags):
            name = re.sub(r"[\s#]+", " ", match[0])
            number = text.count("\n", 0, match.start()) + 1
            if (path, name) not in EXCEPTIONS:
                lines.append((number, f"{path}:{number}: {name!r} -> {instead}"))
    return [line for _, line in sorted(lines)]


@pytest.mark.parametrize("path", paths())
def test_names(path):
    """Old identifiers, flags and metric names are gone."""
    text = (ROOT / path).read_text()
    rules = {
        word(old.replace("_", "[_-]") if old[0] != "_" else old): new for old, new in pairs(NAMES).items()
    }
    lines = offenses(path, text, rules | PATTERNS)
    if path.endswith(".py"):
        _, identifiers = split_python(text)
        lines += offenses(path, identifiers, {word(old): new for old, new in pairs(IDENTIFIERS).items()})
    if lines:
        pytest.fail("\n".join(lines), pytrace=False)


@pytest.mark.parametrize("path", paths())
def test_words(path):
    """Comments, docstrings, help and messages use the words of the field."""
    text = (ROOT / path).read_text()
    if path.endswith(".py"):
        text, _ = split_python(text)
    else:
        text = split_markdown(text) if path.endswith(".md") else split_shell(text)
    for phrase in PHRASES:
        text = re.sub(word(phrase), lambda match: blank(match[0]), text)
    lines = offenses(path, text, {word(old): new for old, new in WORDS.items()}, re.IGNORECASE)
    if lines:
        pytest.fail("\n".join(lines), pytrace=False)


def test_the_checks_find_what_they_look_for():
    source = 'cut = "cut"  # it goes\n# on, in place\ny = "in its place"\n"""A vLLM engine,\nan engine."""\n'
    prose, identifiers = split_python(source)
    assert identifiers.replace("\0", "").split() == ["cut", "y"]
    rules = {word(old): new for old, new in WORDS.items()}
    prose = re.sub("|".join(map(word, PHRASES)), lambda match: blank(match[0]), prose)
    lines = [line.split(" -> ")[0] for line in offenses("x.py", prose, rules)]
    assert lines == ["x.py:1: 'goes on'", "x.py:3: 'place'", "x.py:5: 'engine'"]
    assert split_markdown("a `cut` cut\n```bash\ncut\n```\ncut\n").count("cut") == 2
    assert offenses("x.py", "f(--num-iterations)", {word("num[_-]iterations"): "num_epochs"})
