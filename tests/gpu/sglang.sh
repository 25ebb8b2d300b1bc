#!/usr/bin/env bash
# SGLang on a GPU: `bash tests/gpu/sglang.sh OUT PYTHON [RUN...]`, where PYTHON is an interpreter with SGLang 0.5.17.
# Needs an NVIDIA GPU, and an environment with vLLM, megatron-core, rlk-kernels and transformers 5.16 or newer. Compares the embedded
# model, and trained models of Qwen3-8B's and Qwen3-30B-A3B's shapes at six layers, with the kernels and without.
# The run dense-prefill-graphs captures prefills too; name it to run it.
# The runs dense-tp2 and sparse-tp2 compare SGLang on two GPUs with HF and with Megatron on two (a sparse model with ep=2); name them on a machine with two GPUs.
set -uo pipefail
out=${1:?output folder} python=${2:?an interpreter with SGLang}
shift 2
runs=${*:-embedded dense dense-off sparse sparse-off dense-vllm dense-megatron sparse-vllm}
mkdir -p "$out"
export PYTHONPATH=.:kernels${PYTHONPATH:+:$PYTHONPATH}
# NCCL's sums and SGLang's gathered logits need no NVLink multicast, which a machine may lack.
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1
sglang=sglang:python=$python,device=cuda
failed=0

model() { # NAME SHAPE
  [ -e "/tmp/$1/prompts.jsonl" ] || python3 fixtures/make_large_model.py "$2" --out "/tmp/$1" --minutes 0.4 \
    --step-tokens 4096 --prompts 8 --lengths 60-200 >"$out/$1.txt" 2>&1
}
compared() { # NAME SETTINGS...
  local name=$1
  shift
  python3 -m rlk_align compare --run-dir "/tmp/run-$name" --max-new-tokens 12 "$@" >"$out/$name.txt" 2>&1 ||
    { failed=1; echo "FAIL $name"; tail -n 12 "$out/$name.txt"; }
  grep -hE "^ (PASS|FAIL|INCONCLUSIVE)|^rows|^(decode|prefill)_vs|graph replays" "$out/$name.txt" | sed "s/^/$name: /"
}
for run in $runs; do
  with=${run#*-} kernels=:kernels=rlk more=
  case $with in off | "$run") with=hf ;; vllm) with=vllm kernels=:kv_cache_gb=4,kernels=rlk ;; prefill-graphs) with=hf more=,prefill_graphs=1 ;; esac
  case $run in
    embedded) of=() ;;
    dense*) model dense qwen3-8b:layers=6 && of=(--model /tmp/dense --prompts /tmp/dense/prompts.jsonl) ;;
    sparse*) model sparse qwen3-30b-a3b:layers=6 && of=(--model /tmp/sparse --prompts /tmp/sparse/prompts.jsonl) ;;
    *) echo "sglang.sh: no run is called $run" >&2 && exit 2 ;;
  esac
  case $run in
    *-off) compared "$run" "${of[@]}" --rollout "$sglang" --train "$with" --no-production ;;
    *-tp2)
      megatron=megatron:tp=2
      # Megatron's ranks share the experts.
      [[ $run == sparse* ]] && megatron=megatron:ep=2
      for train in hf:kernels=rlk "$megatron,kernels=rlk"; do
        compared "$run-${train%%:*}" "${of[@]}" --rollout "$sglang,tp=2,kernels=rlk" --train "$train" --contract bitwise --production
      done
      ;;
    *) compared "$run" "${of[@]}" --rollout "$sglang,kernels=rlk$more" --train "$with$kernels" --contract bitwise --production ;;
  esac
done
exit "$failed"
