"""The engine as it is known without importing it."""

from rlk_align.engines.info import EngineInfo, Option
from rlk_align.errors import ModelError


def _check(_option, _config, shape):
    if shape.model_type != "qwen3":
        raise ModelError(f"engine 'outside' runs qwen3, and this is a {shape.model_type}")


OUTSIDE = EngineInfo(
    target="outside_engine.engine:OutsideEngine",
    patch="outside_engine.patch:OutsidePatch",
    options={"temperature": Option(float, default=1.0)},
    check=_check,
)
