#!/usr/bin/env bash
# The four scripts as one story, told in docs/pipeline.md:
#
#     tools/pipeline.sh [FOLDER]     # FOLDER as seen from the repository's root, default runs/pipeline
#
# Two stages run side by side, on one thread each. A stage whose checkpoint is there is not run again. What a stage prints is in
# FOLDER/NAME.log. At the end there are FOLDER/table.md, pipeline.png and report.html.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-runs/pipeline}
mkdir -p "$out"
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE # the tiny model is fastest on one thread
TIMEFORMAT='%R %U'                               # seconds: wall, CPU
trap wait EXIT                                   # when a stage fails, the one beside it comes to its end

stage() { # stage NAME/checkpoint-N SCRIPT FLAGS...
    local name=${1%/*} made=$out/$1 script=$2
    shift 2
    if [[ ! -d $made ]]; then
        echo "$name: python $script $* --output-dir $out --run-name $name"
        rm -rf "${out:?}/$name" # half a stage
        if ! { time python "$script" "$@" --output-dir "$out" --run-name "$name" &> "$out/$name.log"; } 2> "$out/$name.time"; then
            tail -n 20 "$out/$name.log" >&2
            exit 1
        fi
    fi
    [[ -d $made ]] # it isn't there when a signal ended the run early
    echo "$name: done in $(cut -d' ' -f1 "$out/$name.time") s"
}

# 1. What is learnt from pairs: a reward model, also kept as it is after 40 steps, and a judge.
stage reward_model/checkpoint-200 reward_bt.py --max-steps 200 --save-steps 40 --save-total-limit 5 --eval-steps 40 --eval-samples 250 &
first=$!
stage judge/checkpoint-400 grm_sft.py --max-steps 400 --eval-steps 0 --eval-samples 250 &
wait $first
wait $!

# 2. Policies. A reward of weight 0 is logged and not trained on: accuracy and format are the true rule.
policy="--total-steps 30 --eval-steps 6 --eval-samples 300 --eval-num-samples 2"
late=$out/reward_model/checkpoint-200
early=$out/reward_model/checkpoint-40
export JUDGE=$out/judge/checkpoint-400
stage rule/checkpoint-30 ppo_vl.py $policy --rewards accuracy format --reward-weights 0.9 0.1 &
first=$!
stage rm/checkpoint-30 rloo.py $policy --rewards "$late" accuracy format --reward-weights 1 0 0 &
wait $first
wait $!
stage judge_and_rule/checkpoint-30 ppo_vl.py $policy --rewards examples/judge_reward.py:score format accuracy --reward-weights 0.9 0.1 0 &
first=$!
stage early_rm/checkpoint-30 rloo.py $policy --rewards "$early" "$late" accuracy format --reward-weights 1 0 0 0 &
wait $first
wait $!

# 3. What came of it.
python tools/report.py "$out"/{rule,rm,judge_and_rule,early_rm} --output "$out/report.html"
python tools/pipeline.py "$out"
