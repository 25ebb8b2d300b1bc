#!/usr/bin/env bash
# vLLM on a GPU against HF, on the embedded model: `bash tests/gpu/vllm_against_hf.sh OUT`.
# Needs an NVIDIA GPU and an environment with vLLM; ends with a table of what was seen.
set -uo pipefail
out=${1:?output folder}
cli() { python3 -m rlk_align "$@"; }
export PYTHONPATH=tests/cli${PYTHONPATH:+:$PYTHONPATH}

run() { # NAME EXPECTED_EXIT ARGS...
  local name=$1 want=$2
  shift 2
  cli compare --run-dir "/tmp/runs/$name" --output "json=$out/$name.json" "$@" >"$out/$name.txt" 2>"$out/$name.err"
  local code=$?
  if [ "$code" = "$want" ]; then echo "ok   $name"; else echo "FAIL $name: exit $code, wanted $want"; fi
  tail -n 6 "$out/$name.err" | sed 's/^/     /'
  cat "$out/$name.txt"
}
cli doctor
run bf16 0 --rollout vllm --train hf:attn=eager --production
run fp16 0 --rollout vllm:dtype=float16 --train hf:attn=eager,dtype=float16 --no-production
run self 4 --rollout vllm --train hf:attn=eager,patch=patches:swap_two_heads --no-production
run fault 1 --rollout vllm:patch=patches:scale_attention_output --train hf:attn=eager --no-production
run chunked 0 --rollout vllm:max_num_batched_tokens=512,max_num_seqs=16 --train hf:attn=sdpa --no-production
