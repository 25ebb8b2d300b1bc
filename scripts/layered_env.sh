#!/usr/bin/env bash
# layered_env.sh VENV LAYER LOCK: makes the virtual environment LAYER on top of VENV, whose packages it sees, so that torch
# is not installed twice, with the packages of the file LOCK, installed without dependency resolution.
set -euo pipefail
venv=$1 layer=$2 lock=$3

packages() { "$1/bin/python" -c 'import site; print(site.getsitepackages()[0])'; }

[ -x "$layer/bin/python" ] || "$venv/bin/python" -m venv --without-pip "$layer"
# As a site, so that the editable installs in it are seen.
echo "import site; site.addsitedir('$(packages "$venv")')" > "$(packages "$layer")/below.pth"
"$venv/bin/python" -m pip --python "$layer/bin/python" install -qq --disable-pip-version-check --no-deps -r "$lock"
