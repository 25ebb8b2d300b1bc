#!/usr/bin/env bash
# Builds and checks a release: release.sh TAG [FOLDER]. Run by .github/workflows/release.yml; it publishes nothing.
#
# FOLDER (dist/release) gets a wheel and an sdist of both projects, and notes.md, the section of CHANGELOG.md.
# TAG is vVERSION. Where no such tag exists yet, the current commit is built: so the steps can be tried beforehand.
# REPOSITORY is the https address that links on the index lead to; on GitHub the runner knows it.
set -euo pipefail
cd "$(dirname "$0")/.."
TAG="${1:?release.sh TAG [FOLDER]}"
VERSION="${TAG#v}"
OUT="$(realpath -m "${2:-dist/release}")"
REPOSITORY="${REPOSITORY:-${GITHUB_REPOSITORY:+$GITHUB_SERVER_URL/$GITHUB_REPOSITORY}}"
: "${PYTHON:=python3}" "${REPOSITORY:?the https address of the repository}"
fail() { echo "release: $*" >&2; exit 1; }
WORK="$(mktemp -d)"
trap 'rm -rf "$WORK"' EXIT

# What is released is what was committed.
git archive "$(git rev-parse --verify --quiet "refs/tags/$TAG^{commit}" || git rev-parse HEAD)" \
  --prefix=tree/ | tar x -C "$WORK"
TREE="$WORK/tree"
for file in pyproject.toml kernels/pyproject.toml; do
  grep -qxF "version = \"$VERSION\"" "$TREE/$file" || fail "$TAG is not the version in $file"
done
rm -rf "$OUT" && mkdir -p "$OUT"
awk -v head="## $VERSION" 'index($0, "## ") == 1 { on = index($0 " ", head " ") == 1; dated = dated || (on && /[0-9]-[0-9]+-[0-9]/) }
  on; END { exit !dated }' "$TREE/CHANGELOG.md" > "$OUT/notes.md" ||
  fail "CHANGELOG.md has no section '## $VERSION - DATE'"

PYTHONPATH="$TREE/scripts" "$PYTHON" "$TREE/scripts/release_tree.py" "$TREE" "$REPOSITORY" "$TAG"
environment() { "$PYTHON" -m venv "$WORK/$1" && "$WORK/$1/bin/pip" install -qq "${@:2}"; }
environment build build twine
for project in "$TREE" "$TREE/kernels"; do
  "$WORK/build/bin/python" -m build --outdir "$OUT" "$project" > "$WORK/log" || { cat "$WORK/log" >&2; fail "build"; }
done
FILES=("$OUT"/rlk_{align,kernels}-"$VERSION"{-py3-none-any.whl,.tar.gz})
"$WORK/build/bin/python" -m twine check --strict "${FILES[@]}"

# The tool, from its wheel and from its sdist, each in an environment of its own, outside of the checkout.
try_tool() {
  environment "$1" "$2"
  (
    cd "$WORK"
    PATH="$WORK/$1/bin:$PATH"
    [ "$(rlk-align --version)" = "rlk-align $VERSION" ] || fail "$2 says $(rlk-align --version)"
    rlk-align contract check bf16
    rlk-align doctor > "$WORK/log"
  )
}
try_tool wheel "${FILES[0]}"
try_tool sdist "${FILES[1]}"
# The kernels with torch's CPU build: the example of their README.
environment kernels "torch==2.13.0+cpu" 2> "$WORK/log" ||
  environment kernels torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu
sed -n '/^```python/,/^```/{/^```/!p}' kernels/README.md > "$WORK/example.py"
grep -q rlk_kernels "$WORK/example.py" || fail "kernels/README.md has no example"
for file in "${FILES[@]:2}"; do
  "$WORK/kernels/bin/pip" install -qq --force-reinstall --no-deps "$file"
  (cd "$WORK" && "$WORK/kernels/bin/python" -P example.py)
done
ls -l "$OUT"
