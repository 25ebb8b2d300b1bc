#!/usr/bin/env bash
# Installs Chromium for tests/browser, where no browser is found and apt-get may install one. Run by
# `make test`; those tests say so where there is none.
set -euo pipefail

for name in chromium chromium-browser google-chrome; do
  if command -v "$name" >/dev/null; then exit 0; fi
done
if ! command -v apt-get >/dev/null || [ "$(id -u)" != 0 ]; then
  echo "tests/browser needs Chromium or Chrome, which this user cannot install by apt-get; see tests/browser/conftest.py" >&2
  exit 0
fi
echo "installing the system package chromium by apt-get: tests/browser opens the HTML report in it" >&2
apt-get install -y -qq chromium >/dev/null 2>&1 ||
  { apt-get update -qq && apt-get install -y -qq chromium >/dev/null; } ||
  echo "chromium could not be installed; tests/browser needs it" >&2
