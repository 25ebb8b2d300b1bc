#!/usr/bin/env bash
# Makes the virtual environment SGLANG_VENV: SGLang for the CPU, on top of VENV. Run by `make sglang-env`.
set -euo pipefail
: "${VENV:=.venv}" "${SGLANG_VENV:=.venv-sglang}"

bash scripts/layered_env.sh "$VENV" "$SGLANG_VENV" requirements/sglang-cpu.txt
"$SGLANG_VENV/bin/python" -m rlk_align doctor | grep sglang
