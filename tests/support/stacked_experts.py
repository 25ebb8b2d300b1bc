"""The experts of a checkpoint in one tensor a layer."""

import re

import torch


def stacked(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As transformers holds them: one tensor of all experts of a layer."""
    numbered = [
        m for n in values if (m := re.match(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)", n))
    ]
    layers, experts = ({int(m[i]) for m in numbered} for i in (1, 2))
    kept = {n: v for n, v in values.items() if ".experts." not in n}
    for i in sorted(layers):
        of = f"model.layers.{i}.mlp.experts"

        def each(op: str, of: str = of) -> list[torch.Tensor]:
            return [values[f"{of}.{e}.{op}.weight"] for e in sorted(experts)]

        pairs = zip(each("gate_proj"), each("up_proj"), strict=True)
        kept[f"{of}.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
        kept[f"{of}.down_proj"] = torch.stack(each("down_proj"))
    return kept
