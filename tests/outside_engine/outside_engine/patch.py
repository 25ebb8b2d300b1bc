"""The kernels in this engine: its operators become functions of `profile`."""

import torch
from rlk_kernels.integrations import profile

from rlk_align.engines.patch import Kernel, Patch
from rlk_align.model.operators import OPERATORS


def attention(q, k, v):
    ends = (torch.tensor([0, len(x)], dtype=torch.int32, device=x.device) for x in (q, k))
    return profile.attention(q, k, v, *ends, q.shape[-1] ** -0.5)


FUNCTIONS = {"embedding": profile.embed, "rms_norm": profile.norm, "linear": profile.linear}
FUNCTIONS |= {"attention": attention, "activation": profile.act, "logits": profile.logits}
FUNCTIONS["rotary"] = lambda x, positions, inv_freq: profile.rope(x, x, positions, inv_freq)[0]


class OutsidePatch(Patch):
    def in_model(self, model, rope):
        for path, module in model.named_modules():
            op = OPERATORS.get(path.rpartition(".")[2])
            function = op and FUNCTIONS.get(op.name, FUNCTIONS.get(op.formula))
            if function and op.name not in self.excluded:
                module.function = Kernel(function)

    def operators(self, engine):
        return {p: getattr(m, "function", None) for p, m in engine.model.named_modules()}
