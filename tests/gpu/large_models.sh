#!/usr/bin/env bash
# Trained models of published shapes, vLLM against HF on a GPU: `bash tests/gpu/large_models.sh OUT SHAPE...`, where a SHAPE
# is one of fixtures/make_large_model.py, with its layers: gpt-oss-20b:layers=6.
# Needs an NVIDIA GPU and an environment with vLLM. Each model is compared with the kernels, under CUDA graphs too, and then
# without them. vLLM's own gated delta nets are refused on a GPU, so of a model that has them HF alone runs without the kernels.
set -uo pipefail
out=${1:?output folder}
shift
mkdir -p "$out"
export PYTHONPATH=.:kernels${PYTHONPATH:+:$PYTHONPATH}
failed=0

compared() { # NAME MODEL SETTINGS...
  local name=$1 model=$2
  shift 2
  python3 -m rlk_align compare --run-dir "/tmp/run-$name" --max-new-tokens 12 --model "$model" \
    --prompts "$model/prompts.jsonl" --output "json=$out/$name.json" "$@" >"$out/$name.txt" 2>&1
  local code=$?
  grep -hE "^ (PASS|FAIL|INCONCLUSIVE)|^rows|^(decode|prefill)_vs|graph replays" "$out/$name.txt" | sed "s/^/$name: /"
  return $code
}
for shape in "$@"; do
  name=${shape//[:=]/-} model=/tmp/${shape//[:=]/-}
  [ -e "$model/prompts.jsonl" ] || python3 fixtures/make_large_model.py "$shape" --out "$model" --minutes 0.4 \
    --step-tokens 4096 --prompts 8 --lengths 60-200 >"$out/$name-made.txt" 2>&1
  vllm=vllm:kv_cache_gb=4 off=
  # Each sequence of a gated delta net has a state.
  case $shape in qwen3.5* | qwen3-next*) vllm+=,max_num_seqs=64 off=,kernels=rlk ;; esac
  compared "$name" "$model" --rollout "$vllm,kernels=rlk" --train hf:kernels=rlk --contract bitwise --production ||
    { failed=1; echo "FAIL $name"; tail -n 12 "$out/$name.txt"; }
  # An attention of its own in HF: sdpa ignores sinks and caps.
  compared "$name-off" "$model" --rollout "$vllm$off" --train hf:attn=eager --no-production
done
exit "$failed"
