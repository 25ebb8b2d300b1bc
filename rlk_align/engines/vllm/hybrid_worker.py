"""The worker's mixin for a hybrid. vLLM imports it in the process of each rank before it loads the
model, whose module imports torchvision."""

from rlk_align.engines.vllm.registered import register_without_torchvision
from rlk_align.engines.vllm.worker import WorkerExtension

__all__ = ["WorkerExtension"]

register_without_torchvision()
