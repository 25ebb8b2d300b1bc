"""The kernels compile for an H200 with the Triton that is installed: no GPU is needed for that.

`scripts/compile_kernels.py` runs in a process of its own, as Triton interprets kernels in this one.
"""

import ast
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import compile_kernels
import pytest
from offline_h200 import Compiled, Launches

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "compile_kernels.py"
CALLS = (
    "linear, one wave of 64 rows",
    "prefill, head size 64",
    "decode, split",
    "latents on Hopper",
    "linear_logp, not split",
    "rows",
)
"""What launches every kernel written in Gluon, and the main ones of the others."""


GOOD = Compiled(kernel="_sum_hopper_kernel", call="", gluon=True, seconds=1.0, wgmma=96)
BAD = replace(GOOD, wgmma=0, error="AttributeError: no async_store")


def compile_in_a_process(out: Path, *options: str) -> list[Compiled]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *options, "--json", str(out)],
        env={**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [Compiled(**x) for x in json.loads(out.read_text())]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> list[Compiled]:
    out = tmp_path_factory.mktemp("compiled") / "kernels.json"
    return compile_in_a_process(out, "--once", "--only", *CALLS)


def gluon_kernels() -> set[str]:
    """The kernels in the sources that are written in Gluon."""
    kernels = set()
    for path in (ROOT / "kernels" / "rlk_kernels").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                gluon = any("gluon.jit" in ast.unparse(x) for x in node.decorator_list)
                kernels |= {node.name} if gluon else set()
    return kernels


def test_every_gluon_kernel_compiles_to_tensor_core_instructions(compiled):
    assert gluon_kernels() == {x.kernel for x in compiled if x.gluon}
    assert all("wgmma.mma_async" in x.ptx for x in compiled if x.gluon)


def test_the_products_that_are_not_in_gluon_too(compiled):
    products = [x for x in compiled if x.kernel in compile_kernels.PRODUCTS]
    assert {x.kernel for x in products} >= {"_gemm_tma_kernel", "_sum_tma_kernel"}
    assert all("wgmma.mma_async" in x.ptx for x in products)


def test_kernels_have_the_registers_that_they_need(compiled):
    """With Triton 3.9 two in Gluon spill a few numbers; pieces of split attention and of latent
    attention spill more, but between two chunks and not in their loop."""
    pieces = ("_pieces_hopper_kernel", "latent_hopper_kernel")
    most = {kernel: compile_kernels.SPILLS[kernel] for kernel in pieces}
    assert all(x.spills <= most.get(x.kernel, 128 if x.gluon else 0) for x in compiled)


HEADS = (36, 72)


@pytest.fixture(scope="module")
def norms_of_heads(tmp_path_factory) -> list[Compiled]:
    out = tmp_path_factory.mktemp("norms") / "kernels.json"
    return compile_in_a_process(out, "--only", *(f"norms of heads of {dim}" for dim in HEADS))


@pytest.mark.parametrize("dim", HEADS)
def test_a_norms_sum_does_not_follow_how_heads_lie(dim, norms_of_heads):
    """Loads are as wide as strides and addresses let them be, and who holds what follows from
    that: nothing of it may reach a sum, nor part `norm_rope` from `rms_norm`."""
    norms = [x for x in norms_of_heads if x.call == f"norms of heads of {dim}"]
    assert {x.kernel for x in norms} == {"_rms_norm_fwd_kernel", "_norm_rope_kernel"}
    assert len(norms) >= 4
    assert len({tile for x in norms for tile in x.summed}) == 1
    assert all(len(x.summed) == (2 if "rope" in x.kernel else 1) for x in norms)


BRANCHES = ("norms of a branch", "norms of a branch, fp16, unaligned")


@pytest.fixture(scope="module")
def norms_of_branches(tmp_path_factory) -> list[Compiled]:
    out = tmp_path_factory.mktemp("branches") / "kernels.json"
    return compile_in_a_process(out, "--only", *BRANCHES)


def multiply_adds(kernels: list[Compiled]) -> int:
    return sum(x.ptx.count("fma.rn") for x in kernels)


@pytest.mark.parametrize("call", BRANCHES)
def test_a_fused_norm_sums_and_rounds_as_the_two_norms(call, norms_of_branches):
    """A multiply-add of the branch's norm and the residual would skip the rounding of the norm."""
    norms = [x for x in norms_of_branches if x.call == call]
    fused = [x for x in norms if x.kernel == "_norm_add_norm_kernel"]
    separate = [x for x in norms if x.kernel == "_rms_norm_fwd_kernel"]
    assert (len(fused), len(separate)) == (2, 4)
    assert len({tile for x in norms for tile in x.summed}) == 1
    assert all(len(x.summed) == 2 for x in fused)
    assert multiply_adds(fused) == multiply_adds(separate) > 0


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({}, ""),
        ({"error": "AttributeError: async_load"}, "AttributeError: async_load"),
        ({"wgmma": 0}, "no wgmma"),
        ({"wgmma": 0, "narrow": True}, ""),
        ({"serialized": True}, "wgmma waits for wgmma"),
        ({"unused_barriers": 1}, "barriers that are set up and not used: 1"),
        ({"spills": 4096}, "spills 4096 bytes"),
        ({"gluon": False, "kernel": "_gemm_tma_kernel", "wgmma": 0}, "no wgmma"),
        ({"gluon": False, "kernel": "_rope_kernel", "wgmma": 0}, ""),
    ],
)
def test_faults_are_named(changed, fault):
    assert compile_kernels.fault(replace(GOOD, **changed)) == fault


LOG = """
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized
ptxas info    : Compiling entry function '_sum_hopper_kernel' for 'sm_90a'
    136 bytes stack frame, 152 bytes spill stores, 236 bytes spill loads
ptxas info    : Used 168 registers, used 3 barriers, 136 bytes cumulative stack size
"""
KERNEL = SimpleNamespace(__name__="_sum_hopper_kernel", is_gluon=lambda: True)


@pytest.mark.parametrize(("rows", "narrow"), [(32, True), (64, False)])
def test_what_ptxas_says_is_recorded(rows, narrow):
    def compile_it(*_, **options):
        assert options["warmup"]
        print(LOG)
        ptx = "wgmma.mma_async.sync;\n" * 8
        ttgir = f"%d = tt.dot %a, %b, %c : tensor<{rows}x256xbf16, #a> * tensor<256x32xbf16, #b>"
        asm = {"ptx": ptx, "ttgir": ttgir}
        return SimpleNamespace(metadata=SimpleNamespace(shared=1024), asm=asm)

    launches = Launches(call="linear")
    launches.launch(compile_it, KERNEL, (), {"warmup": False})
    (x,) = launches.compiled
    assert (x.kernel, x.call, x.gluon) == ("_sum_hopper_kernel", "linear", True)
    assert (x.registers, x.spills, x.shared, x.wgmma) == (168, 388, 1024, 8)
    assert (x.serialized, x.narrow) == (True, narrow)


BARRIERS = """
  %full = ttg.local_alloc : () -> !ttg.memdesc<1x1xi64, #shared1, #smem, mutable>
  %empty = ttg.local_alloc : () -> !ttg.memdesc<1x1xi64, #shared1, #smem, mutable>
  %8 = ttg.memdesc_index %full[%c0_i32] : !ttg.memdesc<1x1xi64, #shared1, #smem, mutable>
  ttng.init_barrier %8, 1 : !ttg.memdesc<1xi64, #shared1, #smem, mutable>
  %9 = ttg.memdesc_index %empty[%c0_i32] : !ttg.memdesc<1x1xi64, #shared1, #smem, mutable>
  ttng.init_barrier %9, 1 : !ttg.memdesc<1xi64, #shared1, #smem, mutable>
"""


@pytest.mark.parametrize(
    ("use", "unused"),
    [
        ("", 2),
        ("ttg.warp_specialize(%k_smem, %full, %ring) attributes {}", 1),
        ("ttg.warp_specialize(%k_smem, %full, %empty) attributes {}", 0),
        ("ttng.wait_barrier %9, %phase : !ttg.memdesc<1xi64>", 1),
    ],
)
def test_barriers_that_nobody_waits_for_are_counted(use, unused):
    asm = {"ptx": "", "ttgir": BARRIERS + use}

    def compile_it(*_, **__):
        print(LOG)
        return SimpleNamespace(metadata=SimpleNamespace(shared=1024), asm=asm)

    launches = Launches(call="prefill")
    launches.launch(compile_it, KERNEL, (), {})
    assert launches.compiled[0].unused_barriers == unused


def test_a_kernel_that_does_not_compile_is_recorded():
    def compile_it(*_, **__):
        raise ValueError("at 15:4: async_store") from AttributeError("no async_store")

    launches = Launches(call="linear")
    launches.launch(compile_it, KERNEL, (), {"warmup": False})
    (failed,) = launches.compiled
    assert (failed.kernel, failed.call) == ("_sum_hopper_kernel", "linear")
    assert failed.error == "AttributeError: no async_store"


@pytest.mark.parametrize(("kernels", "status"), [([GOOD], 0), ([GOOD, BAD, GOOD], 1), ([], 1)])
def test_the_script_fails_with_any_fault_and_with_nothing(monkeypatch, capsys, kernels, status):
    monkeypatch.setattr(compile_kernels, "interpreting", lambda: False)
    monkeypatch.setattr(compile_kernels, "compile_calls", lambda *_: iter(kernels))
    assert compile_kernels.main([]) == status
    assert capsys.readouterr().out.count("no async_store") == kernels.count(BAD)


def test_the_script_refuses_to_interpret(capsys):
    with pytest.raises(SystemExit):
        compile_kernels.main([])
    assert "TRITON_INTERPRET is set" in capsys.readouterr().err
