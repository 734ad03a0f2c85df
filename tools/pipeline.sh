#!/usr/bin/env bash
# The four scripts as one story, told in docs/pipeline.md:
#
#     tools/pipeline.sh [FOLDER]     # FOLDER as seen from the repository's root, default runs/pipeline
#
# Two stages run side by side, on one thread each. A stage whose checkpoint is there is not run again. What a
# stage prints is in FOLDER/NAME.log. At the end there are FOLDER/table.md, pipeline.png and report.html.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-runs/pipeline}
mkdir -p "$out"
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE # the tiny model is fastest on one thread
TIMEFORMAT='%R %U'                               # seconds: wall, CPU
trap wait EXIT                                   # when a stage fails, the one beside it comes to its end

stage() { # stage NAME SCRIPT STEPS FLAGS...
    local name=$1 script=$2 steps=$3
    shift 3
    if [[ ! -d $out/$name/checkpoint-$steps ]]; then
        echo "$name: python $script --total-steps $steps $*"
        rm -rf "${out:?}/$name" # half a stage
        set -- --total-steps "$steps" "$@" --output-dir "$out" --run-name "$name"
        if ! { time python "$script" "$@" &> "$out/$name.log"; } 2> "$out/$name.time"; then
            tail -n 20 "$out/$name.log" >&2
            exit 1
        fi
    fi
    [[ -d $out/$name/checkpoint-$steps ]] # it isn't there when a signal ended the run early
    echo "$name: done in $(cut -d' ' -f1 "$out/$name.time") s"
}

both() { # wait for the two stages that were started last
    wait "$first"
    wait $!
}

# 1. What is learnt from pairs: a reward model, also kept as it is after 40 steps, and a judge.
stage reward_model reward_bt.py 400 --save-steps 40 --save-total-limit 10 --eval-steps 80 --eval-samples 250 &
first=$!
stage judge grm_sft.py 400 --eval-steps 0 --eval-samples 250 &
both

# 2. Policies. A reward of weight 0 is logged and not trained on: accuracy and format are the true rule.
policy="--eval-steps 6 --eval-samples 300 --eval-num-samples 2 --rewards"
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

# 3. What came of it.
python tools/report.py "$out"/{rule,rm,judge_and_rule,early_rm,reward_model,judge} --output "$out/report.html"
python tools/pipeline.py "$out"
