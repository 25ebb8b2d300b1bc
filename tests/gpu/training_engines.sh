#!/usr/bin/env bash
# The training engines against vLLM on GPUs: `bash tests/gpu/training_engines.sh PHASE OUT`.
#   small   the embedded model, every training engine
#   single  a Qwen3-8B-shaped model of six layers, 64 sequences of 512 to 2048 tokens, one GPU
#   deep    the same at full depth, digests of everything and values of three layers
#   pair    tensor and data parallel on two GPUs
# Needs an environment with vLLM and megatron-core. Ends with the table of what was seen.
set -uo pipefail
phase=${1:?phase} out=${2:?output folder}
export PYTHONPATH=$PWD:$PWD/kernels${PYTHONPATH:+:$PYTHONPATH}
work=${WORK:-/tmp/large}
python=${PYTHON:-python3}
mkdir -p "$out" "$work"

make_model() { # SHAPE MINUTES PROMPTS LENGTHS STEP_TOKENS
  [ -f "$work/$1/config.json" ] || "$python" fixtures/make_large_model.py "$1" --out "$work/$1" \
    --minutes "$2" --prompts "$3" --lengths "$4" --step-tokens "$5"
}
compare() { # NAME TITLE SPECS... -- FLAGS...
  local name=$1 title=$2
  shift 2
  "$python" scripts/compare_engines.py --folder "$work/runs-$name" --title "$title" \
    --out "$out/engines-$name" "$@"
}

case $phase in
small)
  head -n 24 fixtures/prompts.jsonl >"$work/few.jsonl"
  compare h200-small "The embedded model on an H200" --rollout vllm --train hf --train fsdp \
    --train megatron --train megatron:input=packed \
    -- --prompts "$work/few.jsonl" --max-new-tokens 16 --no-production
  ;;
single)
  model=qwen3-8b:layers=6
  make_model $model 1 64 448-1984 8192
  compare h200-single "Qwen3-8B's shape, six layers, on one H200" --rollout vllm \
    --train hf --train fsdp --train megatron \
    -- --model "$work/$model" --prompts "$work/$model/prompts.jsonl" --max-new-tokens 64 \
    --edges prefill_vs_train --trace-budget 3GB --production
  ;;
deep)
  model=qwen3-8b
  make_model $model 0.7 8 512-1024 4096
  compare h200-deep "Qwen3-8B's shape at full depth on one H200" --rollout vllm --train hf \
    -- --model "$work/$model" --prompts "$work/$model/prompts.jsonl" --max-new-tokens 32 \
    --edges prefill_vs_train --layers 0-2 --no-production
  ;;
pair)
  model=qwen3-8b:layers=4
  make_model $model 0.3 16 448-1984 8192
  compare h200-pair "Tensor and data parallel on two H200s" --rollout vllm:tp=2 \
    --train megatron:tp=2 --train fsdp:dp=2 \
    -- --model "$work/$model" --prompts "$work/$model/prompts.jsonl" --max-new-tokens 32 \
    --edges prefill_vs_train --trace-budget 1GB --no-production
  ;;
*)
  echo "unknown phase $phase" >&2
  exit 2
  ;;
esac
