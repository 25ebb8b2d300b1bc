"""The settings that put the kernels into frameworks of RL: `rlk-align doctor --framework NAME`."""

import importlib.metadata
from collections.abc import Iterator
from dataclasses import dataclass

from rlk_align.errors import BadOption


@dataclass(frozen=True)
class Framework:
    """A framework, and how the kernels get into it."""

    package: str
    """The distribution, as `pip` names it."""
    lines: tuple[str, ...]
    """Settings of a run, as the framework takes them; none where the kernels do not fit in."""
    page: str
    """What explains them, and names what is refused."""
    version: str = ""
    """The version that was run; otherwise the source was read at the commit that the page names."""


ON = "RLK_KERNELS=1"
RECIPES = "docs/recipes.md"
FRAMEWORKS = {
    "trl": Framework(
        "trl",
        (
            "from rlk_kernels.integrations.trl import with_kernels",
            *("with_kernels(GRPOTrainer)(", "use_vllm=True"),
        ),
        "docs/trl.md",
        "1.16.0",
    ),
    "verl": Framework(
        "verl",
        (
            ON,
            "actor_rollout_ref.model.external_lib=rlk_kernels.integrations.verl",
            "actor_rollout_ref.actor.strategy=fsdp2",
            "actor_rollout_ref.rollout.name=vllm",
        ),
        "docs/verl.md",
        "0.9.1",
    ),
    "openrlhf": Framework(
        "openrlhf",
        (
            *(ON, "--algo.advantage.is_correction_enable", "--ds.param_dtype bf16"),
            *("--rollout.temperature 1", "--rollout.top_p 1"),
        ),
        RECIPES,
    ),
    "skyrl": Framework(
        "skyrl",
        (
            *(ON, "trainer.strategy=fsdp", "generator.sampling_params.temperature=1.0"),
            "generator.inference_engine.engine_init_kwargs.logprobs_mode=processed_logprobs",
        ),
        RECIPES,
    ),
    "prime-rl": Framework(
        "prime-rl",
        (
            *(ON, 'model.impl = "hf"', 'model.fused_lm_head_token_chunk_size = "disabled"'),
            "enable_fp32_lm_head = false",
        ),
        RECIPES,
    ),
    "easyr1": Framework(
        "verl",
        (ON, "worker.actor.use_torch_compile=false", "worker.rollout.temperature=1.0"),
        RECIPES,
    ),
    "areal": Framework(
        "areal",
        (ON, "gconfig.temperature=1.0", "gconfig.top_p=1.0", "actor.dtype=bfloat16"),
        RECIPES,
    ),
    "roll": Framework(
        "roll",
        (
            *('RLK_KERNELS: "1"', "strategy_name: fsdp2_train"),
            *("top_p: 1.0", "top_k: -1", "temperature: 1.0"),
        ),
        RECIPES,
    ),
    "nemo-rl": Framework("nemo-rl", (), RECIPES),
    "slime": Framework("slime", (), RECIPES),
    "miles": Framework("miles", (), RECIPES),
}
"""Name -> its settings. Each line is in its page too (tests/cli/test_doctor_framework.py)."""


def settings_of(name: str) -> Iterator[str]:
    """What `doctor` says of a framework, line by line.

    Raises:
        BadOption: the name is none of `FRAMEWORKS`.
    """
    framework = FRAMEWORKS.get(name)
    if framework is None:
        known = ", ".join(sorted(FRAMEWORKS))
        raise BadOption(f"--framework {name} is unknown", f"choose from {known}")
    yield f"{name:<12}{_installed(framework)}"
    for line in framework.lines:
        yield f"{'':<12}{line}"
    if not framework.lines:
        yield f"{'':<12}no settings put the kernels into both sides"
    read = "the page names the commit that was read; nothing was run"
    yield f"{'':<12}{framework.page}: {'' if framework.version else read + ', '}what is refused"


def _installed(framework: Framework) -> str:
    try:
        found = importlib.metadata.version(framework.package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
    run = framework.version
    return found if found == run or not run else f"{found}; {run} was run"
