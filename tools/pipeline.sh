#!/usr/bin/env bash
# Train a reward model and a judge, then policies against each of them, see docs/pipeline.md:
#
#     tools/pipeline.sh [DIRECTORY]     # relative to the repository; default: runs/pipeline
#
# Two stages run in parallel, with one thread each. Stages that have finished before are skipped. The output of a
# stage is in DIRECTORY/NAME.log. At the end, DIRECTORY has table.md, pipeline.png and report.html.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-runs/pipeline}
mkdir -p "$out"
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE # the tiny model is fastest with one thread
TIMEFORMAT='%U'                                  # CPU seconds, which depend less on other jobs than wall time
trap wait EXIT                                   # if a stage fails, let the parallel one finish

stage() { # stage NAME SCRIPT STEPS FLAGS...
    local name=$1 script=$2 steps=$3
    shift 3
    if [[ ! -d $out/$name/checkpoint-$steps ]]; then
        echo "$name: python $script --total-steps $steps $*"
        rm -rf "${out:?}/$name" # an unfinished stage
        set -- --total-steps "$steps" "$@" --output-dir "$out" --run-name "$name"
        if ! { time python "$script" "$@" &> "$out/$name.log"; } 2> "$out/$name.time"; then
            tail -n 20 "$out/$name.log" >&2
            exit 1
        fi
    fi
    [[ -d $out/$name/checkpoint-$steps ]] # missing if a signal ended the run early
    echo "$name: done in $(cat "$out/$name.time") CPU seconds"
}

stages=()
start() { # start NAME SCRIPT STEPS FLAGS...: run a stage in the background, after all but one of the earlier stages
    if ((${#stages[@]} == 2)); then
        wait "${stages[0]}"
        stages=("${stages[1]}")
    fi
    stage "$@" &
    stages+=($!)
}

finish() { # wait for the stages that are still running
    for process in "${stages[@]}"; do wait "$process"; done
    stages=()
}

# 1. Learn from pairs: a reward model, with its checkpoint after 40 steps, a judge, and a reward model for which the rejected
# response of half of the pairs is the correct answer without tags.
start reward_model reward_bt.py 400 --save-steps 40 --save-total-limit 10 --eval-steps 80 --eval-rows 250
start judge grm_sft.py 400 --eval-steps 0 --eval-rows 250
python tools/pipeline.py pairs "$out"
start untagged_reward_model reward_bt.py 400 --dataset "$out/pairs.jsonl" --eval-datasets easy-vqa=easy-vqa \
    --eval-steps 80 --eval-rows 250
finish

# 2. Train policies. They differ only in their reward; format is the second one of each, with the same weight.
# Accuracy with weight 0 is only logged.
policy="--eval-steps 6 --eval-prompts 300 --eval-num-samples 2 --rewards"
rm="$policy examples/reward_model.py:score format accuracy --reward-weights 1 1 0"
judge="$policy examples/judge_reward.py:score format accuracy --reward-weights 1 1 0"
export JUDGE=$out/judge/checkpoint-400
late=$out/reward_model/checkpoint-400
early=$out/reward_model/checkpoint-40
untagged=$out/untagged_reward_model/checkpoint-400
for seed in 1 2 3 4 5; do
    start accuracy_and_format_seed$seed rloo.py 30 $policy accuracy format --reward-weights 1 1 --seed $seed
    start judge_and_format_seed$seed rloo.py 30 $judge --seed $seed
    REWARD_MODEL=$early start early_rm_and_format_seed$seed rloo.py 30 $rm --seed $seed
    for kl in 0.01 0.1 1; do
        REWARD_MODEL=$late start rm_and_format_kl${kl}_seed$seed rloo.py 30 $rm --kl-coef $kl --seed $seed
        REWARD_MODEL=$untagged start untagged_rm_and_format_kl${kl}_seed$seed rloo.py 30 $rm --kl-coef $kl --seed $seed
    done
done
finish

# 3. Compare. report.py averages runs whose flags differ only in the seed. Leave early_rm and untagged_rm out of the report:
# only the environment variable REWARD_MODEL tells them from rm, so that they would be averaged.
python tools/report.py "$out"/{reward_model,judge,{accuracy,judge,rm}_and_format_*}/ --output "$out/report.html"
python tools/pipeline.py tables "$out"
