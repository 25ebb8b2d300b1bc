"""`kernels=rlk` in a live HF engine in production mode, in which modules do not count calls."""

from pathlib import Path
from typing import Any

import pytest
import rlk_kernels
import torch
from random_model import write_random_model

from rlk_align.engines.base import Engine
from rlk_align.engines.hf.engine import HFEngine
from rlk_align.engines.patch import patch_of
from rlk_align.engines.spec import EngineSpec
from rlk_align.errors import EngineFailed, ModelError
from rlk_align.model.prompts import Sample, TokenBatch
from rlk_align.model.shape import read_shape

BATCH = TokenBatch((Sample("p", (5, 6, 7), (8, 9)),))


@pytest.fixture
def engine(tmp_path: Path) -> Any:
    model = write_random_model(tmp_path / "model", model_type="qwen3", dtype="float32", head_dim=32)
    spec = EngineSpec.parse("hf:kernels=rlk")
    made = HFEngine(spec, model, read_shape(model), production=True)
    made.kernels = patch_of(spec)
    made.open()
    yield made
    made.kernels.take_out()


def score(engine: Engine) -> None:
    with engine.kernels.called(engine, BATCH):
        engine.score(BATCH, None, lambda done: None)


def test_in_production_the_kernels_tell_what_ran(engine: Any) -> None:
    rlk_kernels.reset_backend_calls()
    score(engine)
    with engine.kernels.called(engine, BATCH):
        pass  # a graph that is replayed


def test_in_production_an_operator_without_its_kernel_is_an_error(engine: Any) -> None:
    rlk_kernels.reset_backend_calls()
    mlp = engine.model.model.layers[1].mlp
    for layer in engine.model.model.layers:
        layer.mlp.forward = type(mlp).__bases__[1].forward.__get__(layer.mlp)
    with pytest.raises(EngineFailed, match=r"in place for layers\.0\.act and 1 more and were not"):
        score(engine)


def test_what_the_kernels_refuse_of_a_live_engine_is_the_users_own_error(engine: Any) -> None:
    engine.model.model.layers[1].mlp.act_fn = torch.nn.GELU()
    with pytest.raises(ModelError, match=r"^hf:kernels=rlk: act_fn is a GELU"):
        score(engine)
