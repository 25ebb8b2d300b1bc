#!/usr/bin/env bash
# verl's loop on a GPU, with vLLM compiled and its CUDA graphs: `bash tests/gpu/verl.sh OUT`.
# Needs an NVIDIA GPU, and an environment with vLLM, verl and rlk-kernels, without TRL. The three runs take turns, because
# vLLM ends where another process releases memory while it starts. Ends with what verl measured in each step.
set -uo pipefail
out=${1:?output folder}
mkdir -p "$out"
# Each worker that Ray starts in advance imports torch.
export RAY_prestart_worker_first_driver=0 PYTHONPATH=.:kernels${PYTHONPATH:+:$PYTHONPATH}
switch=actor_rollout_ref.model.external_lib=rlk_kernels.integrations.verl
failed=0

run() { # NAME SETTINGS...
  local name=$1 folder
  shift
  folder=$(mktemp -d)/loop
  timeout -k 10 420 python3 tests/support/verl_loop.py "$folder" --device cuda "$@" >"$out/$name.err" 2>&1
  local code=$?
  cat "$folder"/verl-*.log >"$out/$name.log"
  [ "$code" = 0 ] && echo "ok   $name" || { echo "FAIL $name: exit $code"; failed=1; tail -n 12 "$out/$name.log"; }
  grep -oE "step:[0-9]+ |rollout_probs_diff_max:[^ ]+|rollout_corr/kl:[^ ]+|rlk_kernels in verl:.*|Capturing CUDA graphs [^:]*: 100%" \
    "$out/$name.log" | sort | uniq -c
}
RLK_KERNELS=1 run both "$switch"
run off
RLK_KERNELS=1 run rollout
exit "$failed"
