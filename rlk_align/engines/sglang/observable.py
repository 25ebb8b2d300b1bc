"""What SGLang computes on GPUs past its modules, where no hook sees it.

One kernel norms the heads of q and k in place of their modules, and in sparse models the rotation
writes keys and values to the cache in place of attention.
"""

import functools


def call_every_module() -> None:
    """Makes the models that this process runs call their modules for both."""
    from sglang.srt.models import qwen3, qwen3_moe

    for module in (qwen3, qwen3_moe):
        module.apply_qk_norm = functools.partial(module.apply_qk_norm, allow_inplace=False)
    qwen3_moe.enable_fused_set_kv_buffer = lambda _batch: False
