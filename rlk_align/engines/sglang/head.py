"""The logits as the output of a module, which hooks can observe and overwrite. SGLang computes them
in a method of its logits processor, whose own output has no logits of prompts."""

import functools
from typing import Any

import torch

HEAD = "rlk_head"
"""The name of the module in the logits processor."""


def add_head(model: Any) -> None:
    """Makes the live model compute logits by a module, which calls SGLang's own method.

    The module's inputs are `(lm_head, hidden states [N, hidden])`, and the bias by name; its output
    is the logits `[N, V]`.
    """
    processor = model.logits_processor
    compute = processor._compute_lm_head

    @functools.wraps(compute)
    def forward(
        lm_head: Any, hidden: torch.Tensor, bias: Any = None, **options: Any
    ) -> torch.Tensor:
        return compute(hidden, lm_head, bias, **options)

    head = torch.nn.Module()
    head.forward = forward
    processor.add_module(HEAD, head)

    @functools.wraps(compute)
    def by_module(
        hidden_states: torch.Tensor, lm_head: Any, embedding_bias: Any = None, **options: Any
    ) -> torch.Tensor:
        return head(lm_head, hidden_states, bias=embedding_bias, **options)

    processor._compute_lm_head = by_module
