"""Launches the kernels of `cuts.py`, and holds what they know of each row."""

from typing import Any

import torch
from torch import Tensor

from rlk_kernels.launching import ShapeCache, launch
from rlk_kernels.memory import empty
from rlk_kernels.ops.sample import cuts as cuts_kernels
from rlk_kernels.ops.sample.plan import WARPS, Blocks


class Cuts:
    """The cuts of the rows of a call, and what the kernels of `cuts.py` know of a row."""

    def __init__(self, t: int, blocks: Blocks, device: torch.device, truncated: bool) -> None:
        """Memory for the cuts if the call is `truncated`, and for `tops` in any case."""

        def new(*shape: int, dtype: torch.dtype = torch.float32) -> Any:
            return empty(shape, dtype, device) if truncated else None

        self.tops = empty((t, blocks.count), torch.float32, device)
        """The largest logit of each block."""
        self.bottoms = new(t, blocks.count)
        """The smallest one above -inf."""
        self.roots = new(t, 2)
        self.logits, self.columns = new(t), new(t, dtype=torch.int32)
        """The cut of each row."""
        self.ks, self.ps = new(t, dtype=torch.int32), new(t)
        """The limits that are left to apply: 0 and 1 for none."""
        self.bounds, self.sums = new(2, 3, t, 4), new(2, t, blocks.count, 16)
        """By phase and stage; by stage."""
        self.counters = new(2, t, 4, dtype=torch.int64)
        self.list = new(t, cuts_kernels.LISTED, dtype=torch.int32)


def find_cuts(
    cache: ShapeCache, cuts: Cuts, logits: Tensor, nodes: Tensor, temperature: Tensor,
    top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None, blocks: Blocks,
) -> None:  # fmt: skip
    """Fills `cuts`, whose tops and bottoms are there, from the nodes [T, blocks, 2] of all
    columns."""
    (t, v), stride, count = logits.shape, logits.stride(0), blocks.count
    has = tuple(x is not None for x in (top_k, top_p, min_p))
    pdl = {"launch_pdl": blocks.overlaps}
    launch(
        cache, cuts_kernels._start_kernel, (t, 1, 1),
        (temperature, top_k, top_p, min_p, nodes, cuts.tops, cuts.bottoms, cuts.roots, cuts.logits,
         cuts.columns, cuts.ks, cuts.ps, cuts.bounds, cuts.counters, t, v, count, blocks.padded,
         blocks.row_levels, *has, blocks.overlaps),
        {"num_warps": 1, **pdl},
    )  # fmt: skip
    ends = cuts.logits, cuts.columns, cuts.ks, cuts.ps
    for phase in (phase for phase in range(2) if has[phase]):
        bounds, counters, by_count = cuts.bounds[phase], cuts.counters[phase], phase == 0
        row = logits, temperature, cuts.roots
        blocked = (*row, cuts.tops, cuts.bottoms, *ends, bounds, cuts.sums, counters)
        if not by_count:
            launch(
                cache, cuts_kernels._list_kernel, (t, count, 1),
                (*row, cuts.tops, cuts.logits, cuts.columns, cuts.ps, bounds, counters, cuts.list,
                 stride, v, count, blocks.columns, blocks.overlaps),
                {"num_warps": WARPS, **pdl},
            )  # fmt: skip
        sizes = (stride, t, v, count, blocks.columns, blocks.padded)
        for stage in range(2):
            launch(
                cache, cuts_kernels._guide_kernel, (t, count, 1),
                (*blocked, *sizes, min(blocks.columns, cuts_kernels.PART), stage, by_count,
                 blocks.overlaps),
                {"num_warps": cuts_kernels.GUIDING_WARPS, **pdl}, (phase, stage),
            )  # fmt: skip
        launch(
            cache, cuts_kernels._gather_kernel, (t, count, 1),
            (*blocked, cuts.list, *sizes, by_count, blocks.overlaps),
            {"num_warps": WARPS, **pdl}, (phase,),
        )  # fmt: skip
        launch(
            cache, cuts_kernels._decide_kernel, (t, 1, 1),
            (*row, *ends, bounds, counters, cuts.list, stride, t, v, by_count, cuts_kernels.CHUNK,
             cuts_kernels.column_digits(v), blocks.overlaps),
            {"num_warps": cuts_kernels.DECIDING_WARPS, **pdl}, (phase,),
        )  # fmt: skip
