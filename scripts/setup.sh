#!/usr/bin/env bash
# Makes the virtual environment VENV with PYTHON: the locked CPU environment, or with GPU=yes vLLM
# for CUDA. Run by `make`, which passes the three.
set -euo pipefail
: "${PYTHON:=python3}" "${VENV:=.venv}" "${GPU:=}"

"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  { echo "setup: $PYTHON is older than Python 3.11; name another with PYTHON=..." >&2; exit 2; }
[ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"
pip() { "$VENV/bin/python" -m pip "$@" -qq --disable-pip-version-check; }

if [ "$GPU" = yes ]; then
  pip install -r requirements/gpu.txt
else
  # The CPU build of torch: from wherever pip is set up to look, else from PyTorch's own index.
  pip install --no-deps "torch==2.13.0+cpu" 2>/dev/null ||
    pip install --no-deps "torch==2.13.0+cpu" --index-url https://download.pytorch.org/whl/cpu
  pip install --no-deps -r requirements/cpu.txt
  DS_BUILD_OPS=0 DS_ACCELERATOR=cpu \
    pip install --no-deps --no-build-isolation -r requirements/deepspeed.txt
fi
pip install --no-deps --no-build-isolation --editable . --editable kernels
"$VENV/bin/rlk-align" --version
