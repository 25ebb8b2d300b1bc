"""The examples of docs/fix-path.md run, as far as a CPU can."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from command import require_engine

from rlk_align.data import data_path

ROOT = Path(__file__).resolve().parents[2]
BLOCKS = dict(
    re.findall(
        r"```python\n# example: (\w+)\n(.*?)```",
        (ROOT / "docs" / "fix-path.md").read_text(encoding="utf-8"),
        re.DOTALL,
    )
)
BEFORE = f"MODEL = {str(data_path('model'))!r}\n"
AFTER = {
    "vllm": "assert len(out[0].outputs[0].token_ids) == 8\n",
    "hf": "assert all(p.grad is not None for p in model.parameters())\n",
    "megatron": """
from types import SimpleNamespace

import torch
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig
from rlk_align.engines.megatron.cpu import cpu_stand_ins

store = torch.distributed.HashStore()
torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
parallel_state.initialize_model_parallel()
args = SimpleNamespace(
    rotary_base=10000, padded_vocab_size=64, max_position_embeddings=32,
    untie_embeddings_and_output_weights=False,
)
with cpu_stand_ins():
    config = TransformerConfig(
        num_layers=2, hidden_size=64, num_attention_heads=4, num_query_groups=2, kv_channels=16,
        ffn_hidden_size=96, normalization="RMSNorm", gated_linear_unit=True, qk_layernorm=True,
        activation_func=torch.nn.functional.silu, add_bias_linear=False, attention_dropout=0.0,
        hidden_dropout=0.0, bf16=True, params_dtype=torch.bfloat16, use_cpu_initialization=True,
    )
    model = model(args, config)().bfloat16()
    ids, at = torch.arange(20).view(2, 10), torch.arange(10).expand(2, 10)
    logits = model(ids, at, None)
    assert logits.dtype == torch.float32
    megatron.token_logprobs(logits.flatten(0, 1), ids.flatten()).sum().backward()
    # Packed as trainers do: no positions, room for longer sequences, padding behind each.
    from megatron.core.packed_seq_params import PackedSeqParams
    from torch.nn.functional import pad
    cu, padded = torch.tensor([0, 10, 20]).int(), torch.tensor([0, 12, 24]).int()
    room = {"qkv_format": "thd", "max_seqlen_q": 20, "max_seqlen_kv": 20}
    ends = PackedSeqParams(cu_seqlens_q=cu, cu_seqlens_kv=cu, **room)
    gaps = PackedSeqParams(
        cu_seqlens_q=cu, cu_seqlens_kv=cu, cu_seqlens_q_padded=padded, cu_seqlens_kv_padded=padded,
        **room,
    )
    assert model(ids.view(1, 20), None, None, packed_seq_params=ends)[0].equal(logits.flatten(0, 1))
    apart = model(pad(ids, (0, 2)).view(1, 24), None, None, packed_seq_params=gaps)[0]
    assert apart.view(2, 12, -1)[:, :10].equal(logits)
assert all(p.grad is not None for p in model.parameters())
megatron.check(megatron.operators(model))
""",
}

FRAMEWORKS = ("slime",)
"""What a script beside this file runs with: too large for the tests' own environment."""


def test_every_example_is_run() -> None:
    assert BLOCKS.keys() == AFTER.keys() | set(FRAMEWORKS)
    lines = [[line for line in code.splitlines() if line.strip()] for code in BLOCKS.values()]
    assert max(map(len, lines)) <= 10


@pytest.mark.parametrize("name", AFTER)
def test_an_example_runs(tmp_path: Path, name: str) -> None:
    if name in ("vllm", "megatron"):
        require_engine(name)
    (tmp_path / "example.py").write_text(BEFORE + BLOCKS[name] + AFTER[name], encoding="utf-8")
    said = run(tmp_path, "example.py")
    if name == "vllm":
        assert "64 operators replaced, and every one was called" in said


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_an_example_runs_in_its_framework(tmp_path: Path, name: str) -> None:
    pytest.importorskip(name, reason=f"{name} is not installed: see example_{name}.py")
    also = BLOCKS["megatron"] if name == "slime" else ""
    (tmp_path / f"rlk_{name}.py").write_text(also + BLOCKS[name], encoding="utf-8")
    script = Path(__file__).with_name(f"example_{name}.py")
    run(tmp_path, str(script), str(data_path("model")))


def run(folder: Path, *command: str) -> str:
    path = os.pathsep.join([str(folder), str(ROOT), str(ROOT / "kernels")])
    settings = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    settings |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=os.environ | settings,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
