"""verl 0.9.1's whole loop with the real packages, on a CPU: Ray, agent loop, vLLM's server, FSDP2
workers, weights copied between them. verl's own metrics say how far rollout and trainer are apart.

Without the kernels there is no run to compare with: vLLM for CPUs repacks its weights, and cannot
take new ones. Needs `make verl-env`.
"""

import warnings
from pathlib import Path

import pytest
import verl_loop
from verl_loop import SWITCH, Loop

pytestmark = [
    pytest.mark.whole_matrix,
    pytest.mark.timeout(1000),
    pytest.mark.skipif(not verl_loop.PYTHON.exists(), reason="run make verl-env"),
]
if not verl_loop.PYTHON.exists():
    warnings.warn(f"verl's loop is not tested: no {verl_loop.PYTHON}; make verl-env", stacklevel=1)
APART = "training/rollout_probs_diff_max", "rollout_corr/kl", "rollout_corr/log_ppl_abs_diff"
HERE = "actor_rollout_ref"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts, a reward and a model, of which the tokenizer has fewer tokens than the embedding."""
    folder = tmp_path_factory.mktemp("verl")
    verl_loop.prepare(folder)
    return folder


def assert_ended(loop: Loop, code: int = 0) -> None:
    assert loop.code == code, loop.said[-6000:]


def test_rollout_and_trainer_are_one_policy(folder: Path) -> None:
    loop = verl_loop.run(folder, SWITCH, v1=True, RLK_KERNELS="1")
    assert_ended(loop)
    for name in APART:
        assert loop.metric(name) == [0.0, 0.0], name
    # Both steps learned something.
    assert all(norm > 0 for norm in loop.metric("actor/grad_norm"))
    # Each copy was checked, the second after an update and with all kernels called.
    assert loop.said.count("parameters are the trainer's, bit for bit") == 2
    assert loop.said.count("operators of Qwen3ForCausalLM, and each was called") == 1
    assert "bit for bit, after 2 checked copies" in loop.said


def test_kernels_in_the_rollout_alone_are_seen_in_verls_metrics(folder: Path) -> None:
    loop = verl_loop.run(folder, steps=1, RLK_KERNELS="1")
    assert_ended(loop)
    (apart,) = loop.metric(APART[0])
    assert 1e-4 < apart < 0.2
    assert loop.metric("rollout_corr/kl") != [0.0]


LEFT_OUT = """
from rlk_kernels.integrations.verl import worker

put_in = worker.use_kernels


def use_kernels(engine, model):
    before = {name: type(module) for name, module in model.named_modules()}
    put_in(engine, model)
    for name, module in model.named_modules():
        if name.endswith(".mlp"):
            module.__class__ = before[name]


worker.use_kernels = use_kernels
"""
OTHER_WEIGHT = """
from rlk_kernels.integrations.verl import worker

recorded = worker.recorded


def changed(weights, digests):
    for name, weight in recorded(weights, digests):
        if name.endswith("layers.2.mlp.down_proj.weight"):
            weight = weight.clone()
            weight[7] *= 1.01
        yield name, weight


worker.recorded = changed
"""
FAULTS = {
    # The trainer's activation is transformers' again.
    "kernel": (LEFT_OUT, "the engine still computes layers.0.act"),
    # One row of one weight is changed on its way to the rollout.
    "weight": (OTHER_WEIGHT, "model.layers.2.mlp.down_proj.weight: 1 of 192 rows differ"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_kernel_left_out_or_another_weight_on_one_side_ends_the_run(
    folder: Path, fault: str
) -> None:
    code, said = FAULTS[fault]
    (folder / f"{fault}_fault.py").write_text(code, encoding="utf-8")
    # verl imports a list of modules too: the fault is planted after the kernels were put in.
    both = f"{SWITCH.partition('=')[0]}=[rlk_kernels.integrations.verl,{fault}_fault]"
    loop = verl_loop.run(folder, both, steps=1, RLK_KERNELS="1")
    assert loop.code != 0
    assert said in loop.said
    assert loop.metric(APART[0]) == []


def check(folder: Path, *overrides: str, **variables: str) -> Loop:
    """`python -m rlk_kernels.integrations.verl`, which reads verl's configuration and starts
    nothing."""
    return verl_loop.run(folder, *overrides, module="rlk_kernels.integrations.verl", **variables)


def test_verls_own_configuration_is_read_without_ray(folder: Path) -> None:
    loop = check(folder, RLK_KERNELS="1")
    assert_ended(loop)
    assert "nothing is refused" in loop.said
    wrong = [
        f"{HERE}.rollout.top_p=0.9", f"{HERE}.rollout.top_k=20", f"{HERE}.rollout.quantization=fp8",
        f"{HERE}.rollout.full_determinism=True", f"{HERE}.model.use_fused_kernels=True",
        f"{HERE}.model.use_liger=True", f"{HERE}.model.lora_rank=8",
        f"{HERE}.actor.ulysses_sequence_parallel_size=2",
        f"{HERE}.rollout.logprobs_mode=raw_logprobs",
        "trainer.v1.trainer_mode=separate_async",
    ]  # fmt: skip
    more = [f"+{HERE}.actor.fsdp_config.mixed_precision.param_dtype=fp16", "trainer.use_v1=True"]
    loop = check(folder, *wrong, *more, f"{HERE}.rollout.temperature=0.7", RLK_KERNELS="0")
    assert_ended(loop, 2)
    for setting in [*wrong, f"{HERE}.rollout.dtype=bfloat16", "RLK_KERNELS=0"]:
        assert setting in loop.said
    assert "refuses 12 settings" in loop.said


def test_ranks_that_pack_or_pad_have_the_bits_of_the_model(folder: Path) -> None:
    """verl's FSDP2 engine on two ranks, without Ray."""
    script = str(Path(__file__).with_name("verl_engine.py"))
    launcher = ("torch.distributed.run", "--nproc-per-node", "2", script, str(folder / "model"))
    loop = verl_loop.python(folder, "-m", *launcher)
    assert_ended(loop)


ASKED = """
import sys
from pathlib import Path

import hydra
import verl.trainer
from rlk_kernels.integrations.verl import settings

folder = str(Path(verl.trainer.__file__).parent / "config")
with hydra.initialize_config_dir(folder, version_base=None):
    config = hydra.compose("ppo_trainer", sys.argv[1:])
for path, *_ in settings.REFUSED:
    here = config.actor_rollout_ref
    for name in path.split("."):
        if name not in here:
            print("verl has no", path)
            break
        here = here[name]
"""


def test_verl_has_every_setting_that_is_refused(folder: Path) -> None:
    """verl does not read a setting that it does not know."""
    loop = verl_loop.python(folder, "-c", ASKED, *verl_loop.settings(folder, 1))
    assert_ended(loop)
    # verl's critic asks for a value head, in a configuration that it makes in its worker.
    assert [line for line in loop.said.splitlines() if line.startswith("verl has no")] == [
        "verl has no model.model_type"
    ]
