#!/usr/bin/env bash
# vLLM's own fp8 on a GPU against HF in bf16: `bash tests/gpu/quantised.sh OUT [RUN...]`.
# Needs an NVIDIA GPU with fp8 (Hopper), and an environment with vLLM 0.26, rlk-kernels and transformers 5.16 or newer. MODEL may name
# a dense model in bf16 with prompts.jsonl in its folder; without it, a model of Qwen3-8B's shape at six layers is trained first.
# Each checkpoint in fp8 is made from that model. Ends with a line for each run: its verdict, and what was seen.
set -uo pipefail
out=${1:?output folder}
shift
runs=${*:-block block-float tensor static channel online online-block cache all stale}
mkdir -p "$out"
export PYTHONPATH=.:kernels${PYTHONPATH:+:$PYTHONPATH} VLLM_DEEP_GEMM_WARMUP=skip
model=${MODEL:-/tmp/dense}
failed=0
[ -e "$model/prompts.jsonl" ] || python3 fixtures/make_large_model.py qwen3-8b:layers=6 --out "$model" --minutes 0.4 \
  --step-tokens 4096 --prompts 8 --lengths 60-200 >"$out/model.txt" 2>&1 || { tail -n 5 "$out/model.txt"; exit 1; }

checkpoint() { # FORMAT [MODEL [NAME]]
  local folder=/tmp/fp8-${3:-$1}
  [ -e "$folder/config.json" ] || python3 fixtures/quantise.py "${2:-$model}" --format "$1" --out "$folder" \
    --prompts "$model/prompts.jsonl" >"$out/make-$1.txt" 2>&1 || tail -n 5 "$out/make-$1.txt" >&2
  echo "$folder"
}
compared() { # NAME EXPECTED_EXIT ROLLOUT
  local name=$1 want=$2 code
  rm -rf "/tmp/run-$name"
  python3 -m rlk_align compare --run-dir "/tmp/run-$name" --max-new-tokens 12 --model "$model" --prompts "$model/prompts.jsonl" \
    --rollout "$3" --train hf --no-production >"$out/$name.txt" 2>"$out/$name.err"
  code=$?
  if [ "$code" = "$want" ]; then echo "ok   $name"; else
    failed=1
    echo "FAIL $name: exit $code, wanted $want"
    tail -n 12 "$out/$name.err"
  fi
}
for run in $runs; do
  case $run in
    block) compared "$run" 0 "vllm:kv_cache_gb=4,model=$(checkpoint block)" ;;
    block-float) VLLM_USE_DEEP_GEMM_E8M0=0 compared "$run" 0 "vllm:kv_cache_gb=4,model=$(checkpoint block)" ;;
    block-cutlass) VLLM_USE_DEEP_GEMM=0 VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER=0 compared "$run" 0 "vllm:kv_cache_gb=4,model=$(checkpoint block)" ;;
    tensor | static | channel) compared "$run" 0 "vllm:kv_cache_gb=4,model=$(checkpoint "$run")" ;;
    online) compared "$run" 0 vllm:kv_cache_gb=4,quantization=fp8 ;;
    online-block) compared "$run" 0 vllm:kv_cache_gb=4,quantization=fp8_per_block ;;
    online-channel) compared "$run" 0 vllm:kv_cache_gb=4,quantization=fp8_per_channel ;;
    cache) compared "$run" 0 vllm:kv_cache_gb=4,kv_cache_dtype=fp8_e4m3 ;;
    all) compared "$run" 0 "vllm:kv_cache_gb=4,model=$(checkpoint block),kv_cache_dtype=fp8_e4m3" ;;
    stale)
      # The rollout is an image of other weights: one projection of the model was scaled before it was quantised.
      [ -e /tmp/dense-moved/config.json ] || python3 - "$model" <<'PY'
import shutil
import sys
from pathlib import Path

from safetensors.torch import load_file, save_file

moved = Path("/tmp/dense-moved")
shutil.copytree(sys.argv[1], moved, dirs_exist_ok=True)
name = "model.layers.1.mlp.up_proj.weight"
for path in moved.glob("*.safetensors"):
    tensors = load_file(path)
    if name in tensors:
        tensors[name] = tensors[name] * 1.01
        save_file(tensors, path, {"format": "pt"})
PY
      compared "$run" 4 "vllm:kv_cache_gb=4,model=$(checkpoint tensor /tmp/dense-moved stale)"
      ;;
    *) echo "quantised.sh: no run is called $run" >&2 && exit 2 ;;
  esac
done
for run in $runs; do
  echo "== $run"
  grep -hE "^ (PASS|FAIL|INCONCLUSIVE)|^rows|^closest|^(decode|prefill)_vs|no operator beyond|beyond its budget|Kernel|quantis|image of" "$out/$run.txt"
done
exit "$failed"
