"""The adapter of SGLang around the live scheduler of a job, and what of SGLang is not recorded."""

import importlib.metadata
import os
from typing import Any

from rlk_align.engines.process.ranks import Ranks
from rlk_align.engines.sglang.engine import SGLangEngine
from rlk_align.engines.sglang.head import add_head
from rlk_align.engines.sglang.limits import VERSIONS, attention_backend
from rlk_align.engines.spec import EngineSpec
from rlk_align.errors import BadOption
from rlk_align.model.checkpoint import read_config, resolve_model
from rlk_align.model.shape import read_shape

_ONE = {
    "pp_size": "pipeline stages",
    "dp_size": "data-parallel engines",
    "ep_size": "experts that ranks share",
    "attn_cp_size": "context parallelism",
    "dcp_size": "context parallelism of decode",
    "moe_dp_size": "data-parallel experts",
}
"""Server argument that has to be 1 -> what more of it are."""
_OFF = {
    "enable_dp_attention": "attention divided among data-parallel ranks",
    "speculative_algorithm": "speculative decoding",
    "enable_lora": "adapters",
    "quantization": "quantised weights",
    "is_embedding": "embeddings",
    "enable_torch_compile": "compiled code",
}
"""Server argument that has to be off -> what it switches on."""
RECORDED_VERSION = VERSIONS["cpu"]
"""The version of SGLang whose scheduler the recorder is written for."""


def check_arguments(given: Any) -> None:
    """Raises BadOption for server arguments that are not recorded."""
    from sglang.srt.arg_groups.overrides import resolved_view

    version = importlib.metadata.version("sglang")
    if version != RECORDED_VERSION:
        raise BadOption(
            f"RLK_RECORD: SGLang {version} is not recorded: its scheduler's methods are private, "
            "and change",
            f"record SGLang {RECORDED_VERSION}",
        )
    args = resolved_view(given)
    refused = {
        f"SGLang on device={args.device}": args.device != "cpu",
        "RLK_KERNELS=1": os.environ.get("RLK_KERNELS", "0") not in ("", "0"),
        f"disaggregation_mode={args.disaggregation_mode}": args.disaggregation_mode
        not in (None, "null"),
    }
    refused |= {what: getattr(args, name) not in (None, 1) for name, what in _ONE.items()}
    refused |= {what: bool(getattr(args, name)) for name, what in _OFF.items()}
    for what, is_so in refused.items():
        if is_so:
            raise BadOption(f"RLK_RECORD: {what}: not recorded", "unset RLK_RECORD, or that")
    attention_backend(lambda _: args.attention_backend, args.device)


class RecordedSGLang(SGLangEngine):
    """The live engine of a job."""

    def attach(self, runner: Any, ranks: Ranks) -> None:
        """Describes a live ModelRunner of another program, instead of one that it opens itself."""
        self.runner, self.model, self.ranks = runner, runner.model, ranks
        self._stand_ins = ()
        add_head(self.model)


def live_engine(scheduler: Any) -> RecordedSGLang:
    """The adapter around a live Scheduler. Raises BadOption or ModelError for a setting or a model
    that is not recorded."""
    from sglang.srt.arg_groups.overrides import resolved_view
    from sglang.srt.distributed import get_tp_group

    check_arguments(scheduler.server_args)
    args, runner = resolved_view(scheduler.server_args), scheduler.tp_worker.model_runner
    model = resolve_model(args.model_path)
    shape = read_shape(model)
    options: dict[str, str | int | float | bool] = {
        "tp": args.tp_size,
        "dtype": str(runner.model_config.dtype).removeprefix("torch."),
        "radix_cache": not args.disable_radix_cache,
    }
    spec = EngineSpec("sglang", options).canonical(shape.dtype)
    spec.info.check(spec.option, read_config(model), shape)
    engine = RecordedSGLang(spec, model, shape)
    group = get_tp_group()
    ranks = Ranks(group.rank_in_group, group.world_size, group.device, group.device_group)
    engine.attach(runner, ranks)
    return engine
