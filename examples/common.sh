# The flags of docs/recipes.md, for bash. Change a copy of this file, and source that in each shell: . ./common.sh
# In a command, ":?" makes bash stop if you forgot that. If a flag is given twice, the last one wins.
. .venv/bin/activate
export WANDB_PROJECT=my_project
export OMP_NUM_THREADS=8  # torchrun's default is 1 thread, which slows image processing
GPUS=8  # or 1
COMMON=(
    --model Qwen/Qwen2.5-VL-7B-Instruct --dataset train.jsonl --eval-dataset val.jsonl --rewards answers.py:accuracy
    --system-prompt "Think step by step. End with a line of the form Answer: X, where X is one word, one number, or the letter of the choice."
    --max-pixels 1000000  # larger images are scaled down; here, an image has up to 1,300 tokens (28 x 28 pixels each)
    --max-response-length 1024  # tokens; default 512
    --prompts-per-rollout 128  # on all GPUs together; on one GPU, 32
    --sampler vllm  # an engine per GPU, which sleeps during updates
    --gradient-checkpointing  # less memory, a third slower
    --eval-num-samples 1  # per evaluation prompt, besides a greedy response; default 8
    --total-steps 200 --save-steps 50 --save-total-limit 4
    --min-lr-ratio 1  # constant learning rate after warmup; by default, it falls to a tenth
    --track wandb  # delete this line if you don't use W&B
)
LORA=(
    --lora-rank 16  # all linear layers of the language model; for others, change prepare_for_training
    --learning-rate 5e-5  # five times the default
)
FULL=(  # does not fit on one GPU
    --freeze visual  # saves 2 of 71 GB; without it, vision tower and merger are trained, too
    --kl-coef 0  # a penalty needs a reference model, which doesn't fit with ZeRO-2
    --learning-rate 3e-6  # three times the default
)
TRAIN=(
    "${LORA[@]:?}"  # or FULL
)
GRPO=(  # with a patched rloo.py
    "${FULL[@]:?}" --learning-rate 1e-6 --train-batch-size 256  # four updates per rollout, so at a lower rate
)
PPO=(  # with ppo_vl.py, at its default rates: policy 1e-6, critic 1e-5
    --freeze visual --zero-stage 3 --train-batch-size 256 --num-epochs 1  # four updates
    --gae-lambda 1  # with 0.95 and values of 0, a token 100 tokens before the end would get 0.6% of the score
    --vllm-gpu-memory-utilization 0.3 --save-total-limit 2  # the critic needs memory and disk, too
)
CHECK=(
    "${COMMON[@]:?}" --save-total-limit 0 --eval-prompts 16  # no checkpoints, short evaluations
)
show() { python tools/show.py "$@"; }  # show FOLDER METRIC...: values by step, means of the first and the last ten
