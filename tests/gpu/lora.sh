#!/usr/bin/env bash
# LoRA on a GPU, vLLM against HF: `bash tests/gpu/lora.sh OUT`.
# Needs an NVIDIA GPU, and an environment with vLLM and PEFT. An adapter of rank 16 on a trained model of Qwen3-8B's shape at
# six layers: with the kernels, under CUDA graphs too; without them; and applied by vLLM, merged by HF.
set -uo pipefail
out=${1:?output folder} model=/tmp/dense adapter=/tmp/adapter
mkdir -p "$out"
export PYTHONPATH=.:kernels:kernels/bench${PYTHONPATH:+:$PYTHONPATH}
failed=0

compared() { # NAME SETTINGS...
  local name=$1
  shift
  python3 -m rlk_align compare --run-dir "/tmp/run-$name" --max-new-tokens 12 --model "$model" \
    --prompts "$model/prompts.jsonl" --output "json=$out/$name.json" "$@" >"$out/$name.txt" 2>&1
  local code=$?
  grep -hE "^ (PASS|FAIL|INCONCLUSIVE)|^rows|^(decode|prefill)_vs|graph replays" "$out/$name.txt" | sed "s/^/$name: /"
  return $code
}
[ -e $model/prompts.jsonl ] || python3 fixtures/make_large_model.py qwen3-8b:layers=6 --out $model --minutes 0.4 \
  --step-tokens 4096 --prompts 8 --lengths 60-200 >"$out/made.txt" 2>&1
[ -e $adapter ] || python3 -c "
from pathlib import Path
from adapters import write_adapters
write_adapters(Path('$model'), Path('/tmp/adapters'), 1)[0].rename('$adapter')"
compared lora --rollout vllm:kv_cache_gb=4,lora=$adapter,kernels=rlk --train hf:lora=$adapter,kernels=rlk \
  --contract bitwise --production || { failed=1; echo "FAIL lora"; tail -n 12 "$out/lora.txt"; }
compared lora-off --rollout vllm:kv_cache_gb=4,lora=$adapter --train hf:lora=$adapter --no-production
compared lora-merged --rollout vllm:kv_cache_gb=4,lora=$adapter --train hf:lora=$adapter,merged=1 --no-production
exit "$failed"
