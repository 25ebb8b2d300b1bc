#!/usr/bin/env bash
# The gate for any CI: bash gate.sh RUN [--contract C]. Reports go to $REPORTS, `reports` by default.
# The exit code is rlk-align's: 0 pass, 1 fail, 2 usage, 3 the tool failed, 4 inconclusive.
set -eu
reports=${REPORTS:-reports}
mkdir -p "$reports"
exec rlk-align gate "$@" \
  --output "json=$reports/verdict.json" \
  --output "junit=$reports/junit.xml" \
  --output "markdown=$reports/comment.md"
