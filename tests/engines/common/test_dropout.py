"""The active dropout of a live model in training mode."""

import torch

from rlk_align.engines.common.attributes import active_dropout


class Attention(torch.nn.Module):
    """Keeps the probability like transformers' attentions."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.attention_dropout = probability


def model(*probabilities: float) -> torch.nn.Sequential:
    return torch.nn.Sequential(*map(Attention, probabilities))


def test_only_modules_in_training_mode_drop_values() -> None:
    assert active_dropout(model(0.05).eval()) == {}
    assert active_dropout(model(0.0, 0.0)) == {}
    assert active_dropout(torch.nn.Linear(2, 2)) == {}


def test_modules_and_probabilities_are_reported() -> None:
    assert active_dropout(model(0.0, 0.05)) == {"dropout": "0.05 in 1"}
    found = active_dropout(torch.nn.Sequential(model(0.05, 0.1), torch.nn.Dropout(0.2)))
    assert found == {"dropout": "0.2 in 0.0 and 2 more modules"}
    assert active_dropout(torch.nn.Dropout(0.2)) == {"dropout": "0.2 in the model"}
    one = model(0.05, 0.1)
    one.eval()
    one[1].train()
    assert active_dropout(one) == {"dropout": "0.1 in 1"}
