#!/usr/bin/env bash
# All four scripts in one pipeline, see docs/pipeline.md:
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
TIMEFORMAT='%R %U'                               # seconds: wall, CPU
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
    echo "$name: done in $(cut -d' ' -f1 "$out/$name.time") s"
}

both() { # wait for the last two stages
    wait "$first"
    wait $!
}

# 1. Learn from pairs: a reward model, with its checkpoint after 40 steps, and a judge.
stage reward_model reward_bt.py 400 --save-steps 40 --save-total-limit 10 --eval-steps 80 --eval-rows 250 &
first=$!
stage judge grm_sft.py 400 --eval-steps 0 --eval-rows 250 &
both

# 2. Train policies. A reward with weight 0 is only logged: accuracy and format are the true rule.
policy="--eval-steps 6 --eval-prompts 300 --eval-num-samples 2 --rewards"
export JUDGE=$out/judge/checkpoint-400 REWARD_MODEL=$out/reward_model/checkpoint-400
stage rule ppo_vl.py 30 $policy accuracy format --reward-weights 0.9 0.1 &
first=$!
stage rm rloo.py 30 $policy examples/reward_model.py:score format accuracy --reward-weights 1 1 0 &
both
stage judge_and_rule ppo_vl.py 30 $policy examples/judge_reward.py:score format accuracy --reward-weights 0.9 0.1 0 &
first=$!
export REWARD_MODEL=$out/reward_model/checkpoint-40
stage early_rm rloo.py 30 $policy examples/reward_model.py:score accuracy format --reward-weights 1 0 0 &
both

# 3. Compare.
python tools/report.py "$out"/{rule,rm,judge_and_rule,early_rm,reward_model,judge} --output "$out/report.html"
python tools/pipeline.py "$out"
