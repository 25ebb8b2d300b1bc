"""The methods by which vLLM's products compute, and the weights that are read through them."""

import torch

from rlk_align.engines.common.products import read_weight
from rlk_align.engines.vllm.weights import product_method


class Block(torch.nn.Module):
    """A sparse block of GLM-4.5 in vLLM 0.26, whose router is torch's own linear."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(70, 6, bias=False, dtype=torch.float32)


def test_a_router_of_torch_is_read_through_its_product() -> None:
    model = Block()
    method = product_method(model, "gate.weight")
    assert torch.equal(read_weight(method, model.gate), model.gate.weight)
