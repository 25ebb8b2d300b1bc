"""FSDP2 in its own process: the effect of checkpointing and mixed precision on gradients."""

import pytest
from command import said_by

from rlk_align.data import data_path
from rlk_align.engines.base import Sampling
from rlk_align.engines.hf.fsdp import FSDPEngine
from rlk_align.engines.spec import EngineSpec
from rlk_align.errors import BadOption
from rlk_align.model.prompts import TokenBatch
from rlk_align.model.shape import read_shape

PROGRAM = """
import torch
from rlk_align.engines.spec import EngineSpec
from rlk_align.data import data_path
from rlk_align.engines.hf.fsdp import FSDPEngine
from rlk_align.engines.process.ranks import destroy_process_group, join
from rlk_align.model.shape import read_shape

torch.set_num_threads(1)
ranks = join("cpu", 60.0)
model = data_path("model")

def gradients(options):
    engine = FSDPEngine(EngineSpec.parse("fsdp:" + options), model, read_shape(model))
    engine.ranks = ranks
    engine.open()
    ids = torch.arange(2, 42)[None]
    logits = engine.model(input_ids=ids, use_cache=False).logits[0]
    loss = torch.nn.functional.cross_entropy(logits[:-1].float(), ids[0, 1:])
    loss.backward()
    found = {n: p.grad.full_tensor() for n, p in engine.model.named_parameters()}
    recomputed = engine.model.is_gradient_checkpointing
    return loss.detach(), found, recomputed

base_loss, base, plain = gradients("dp=1,checkpointing=0")
assert not plain
for options in ("dp=1,checkpointing=0", "dp=1,checkpointing=1"):
    loss, found, recomputed = gradients(options)
    assert recomputed == options.endswith("1")
    assert torch.equal(loss, base_loss)
    assert found.keys() == base.keys() and len(base) > 40
    wrong = [n for n in base if not torch.equal(base[n], found[n])]
    assert not wrong, (options, wrong[:3])
    assert all(g.dtype == torch.float32 and g.abs().sum() > 0 for g in found.values())
pure = gradients("dp=1,mixed=0")[1]
assert {g.dtype for g in pure.values()} == {torch.bfloat16}
destroy_process_group()
print("fine")
"""


@pytest.mark.timeout(180)
def test_checkpointing_changes_no_bit_of_loss_and_gradients() -> None:
    assert "fine" in said_by("hf", ["-c", PROGRAM], timeout=150).splitlines()


def test_it_does_not_sample() -> None:
    """It is refused as a rollout before anything is computed."""
    model = data_path("model")
    engine = FSDPEngine(EngineSpec.parse("fsdp:dp=2"), model, read_shape(model))
    with pytest.raises(BadOption, match="'fsdp' does not sample"):
        engine.sample(TokenBatch(()), Sampling(4, 0), None, lambda _done: None)
