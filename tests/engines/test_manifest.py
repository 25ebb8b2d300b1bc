"""What a capture records of its engine's environment."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlk_align.engines import manifest
from rlk_align.engines.info import EngineInfo
from rlk_align.trace.schema import CUTS

FEATURE = "avx512_bf16"


def environment(kernels: Any = None, **spec: Any) -> dict[str, str]:
    info = EngineInfo("", rounds_with=spec.pop("rounds_with", FEATURE))
    return manifest._environment(
        SimpleNamespace(
            spec=SimpleNamespace(info=info, **{"device": "cpu", "options": {}} | spec),
            kernels=kernels,
            shape=SimpleNamespace(model_type="qwen3"),
            ranks=SimpleNamespace(world=1),
        )  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("machine", "has", "case", "cuts"),
    [
        ("x86_64", False, {}, True),
        ("x86_64", True, {}, False),
        ("aarch64", False, {}, False),
        ("x86_64", False, {"device": "cuda"}, False),
        ("x86_64", False, {"rounds_with": ""}, False),
        # The kernels round; an operator that is left to the engine does not.
        ("x86_64", False, {"kernels": "rlk"}, False),
        ("x86_64", False, {"kernels": "rlk", "options": {"except": "attn"}}, True),
    ],
)
def test_where_an_engines_own_kernels_cut_numbers_off(
    monkeypatch: pytest.MonkeyPatch, machine: str, has: bool, case: dict[str, Any], cuts: bool
) -> None:
    monkeypatch.setattr(manifest.platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.cpu, f"_is_{FEATURE}_supported", lambda: has)
    assert (CUTS in environment(**case)) == cuts
