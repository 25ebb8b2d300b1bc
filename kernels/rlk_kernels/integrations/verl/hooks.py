"""Where this package enters verl: one function for each of its modules, which is patched in each
process that imports it, whether before this package or after. Ray may import this package earlier
than verl's configuration does.
"""

import functools
import importlib.machinery
import os
import sys
from collections.abc import Callable
from typing import Any

from rlk_kernels.integrations.errors import NotSupported
from rlk_kernels.integrations.verl import settings


def install() -> None:
    """Patches what this process has imported of verl, and what it will import."""
    waiting = dict(PATCHES)
    for name in PATCHES:
        if name in sys.modules:
            waiting.pop(name)(sys.modules[name])
    sys.meta_path.insert(0, _Finder(waiting))


class _Finder:
    """Patches modules once they are imported."""

    def __init__(self, waiting: dict[str, Callable[[Any], None]]) -> None:
        self._waiting = waiting

    def find_spec(self, name: str, path: Any, _target: Any = None) -> Any:
        if name not in self._waiting:
            return None
        patch = self._waiting.pop(name)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                run(module)
                patch(module)

            spec.loader.exec_module = exec_module
        return spec


def _wrap(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replaces a function by `make(function)`. Raises NotSupported where verl lacks it."""
    original = vars(owner).get(name)
    if original is None:
        where = getattr(owner, "__qualname__", owner.__name__)
        raise NotSupported(f"this verl has no {where}.{name}; verl 0.9.1 is served")
    setattr(owner, name, functools.wraps(original)(make(original)))


def _patch_trainer(module: Any) -> None:
    """`RayPPOTrainer`, verl's trainer with use_v1=False."""
    trainer = module.RayPPOTrainer

    def checked(init: Any) -> Any:
        def __init__(self: Any, config: Any, *args: Any, **more: Any) -> None:
            settings.check(config, os.environ)
            init(self, config, *args, **more)

        return __init__

    _wrap(trainer, "__init__", checked)
    _wrap(trainer, "fit", _reporting)


def _patch_trainer_v1(module: Any) -> None:
    """`PPOTrainer` of trainer.ppo.v1, which imports this package as it makes its tokenizer."""
    trainer = module.PPOTrainer

    def checked(original: Any) -> Any:
        def _init_resource_pool_mgr(self: Any, *args: Any) -> Any:
            settings.check(self.config, os.environ)
            return original(self, *args)

        return _init_resource_pool_mgr

    _wrap(trainer, "_init_resource_pool_mgr", checked)
    _wrap(trainer, "fit", _reporting)


def _reporting(fit: Any) -> Any:
    """`fit`, at whose end every worker says what its kernels did; raises NotSupported where that is
    not all."""

    def fit_and_report(self: Any, *args: Any, **more: Any) -> Any:
        result = fit(self, *args, **more)
        from rlk_kernels.integrations.verl.worker import conclude

        print(conclude(self.actor_rollout_wg.rlk_report()), flush=True)
        return result

    return fit_and_report


def _patch_engine(module: Any) -> None:
    """`FSDPEngine`: the model that it builds, and its log-probs."""
    from rlk_kernels.integrations.verl import worker

    def with_kernels(build: Any) -> Any:
        def _build_module(self: Any) -> Any:
            model = build(self)
            if self.model_config.model_type == "language_model":
                worker.use_kernels(self, model)
            return model

        return _build_module

    def counted(step: Any) -> Any:
        def optimizer_step(self: Any) -> Any:
            norm = step(self)
            worker.count_step(self)
            return norm

        return optimizer_step

    _wrap(module.FSDPEngine, "_build_module", with_kernels)
    _wrap(module.FSDPEngine, "optimizer_step", counted)
    _wrap(module, "logprobs_from_logits", lambda _original: worker.LOGPROBS)


def _patch_rollout(module: Any) -> None:
    """`ServerAdapter`, by which a worker copies its weights to the server."""
    from rlk_kernels.integrations.verl import worker

    def checking(update: Any) -> Any:
        async def update_weights(self: Any, weights: Any, *args: Any, **more: Any) -> Any:
            digests = worker.start_copy(self)
            result = await update(self, worker.recorded(weights, digests), *args, **more)
            await worker.check_copy(self, digests)
            return result

        return update_weights

    _wrap(module.ServerAdapter, "update_weights", checking)


def _patch_workers(module: Any) -> None:
    """`ActorRolloutRefWorker` gets a method that the trainer calls. Its own methods stay: Ray has
    them by their names already."""
    from verl.single_controller.base.decorator import Dispatch, register

    def rlk_report(self: Any) -> dict[str, Any]:
        from rlk_kernels.integrations.verl import worker

        return worker.report()

    decorated = register(dispatch_mode=Dispatch.ONE_TO_ALL)(rlk_report)
    module.ActorRolloutRefWorker.rlk_report = decorated


def _patch_replica(module: Any) -> None:
    """`vLLMReplica`, which starts the policy's servers, and those of reward models and teachers."""

    def of_ours(init: Any) -> Any:
        def __init__(self: Any, *args: Any, **more: Any) -> None:
            init(self, *args, **more)
            if not (self.is_reward_model or self.is_teacher_model):
                from rlk_kernels.integrations.verl.server import Server

                self.server_class = module.ray.remote(Server)

        return __init__

    _wrap(module.vLLMReplica, "__init__", of_ours)


PATCHES: dict[str, Callable[[Any], None]] = {
    "verl.trainer.ppo.ray_trainer": _patch_trainer,
    "verl.trainer.ppo.v1.trainer_base": _patch_trainer_v1,
    "verl.workers.engine.fsdp.transformer_impl": _patch_engine,
    "verl.workers.engine_workers": _patch_workers,
    "verl.workers.rollout.vllm_rollout.vllm_async_server": _patch_replica,
    "verl.workers.rollout.vllm_rollout.vllm_rollout": _patch_rollout,
}
