"""Parts of the integration into HF transformers."""

from collections.abc import Callable

import pytest
import torch
from hf_models import small_model, transformers
from rlk_kernels.integrations import hf
from rlk_kernels.integrations.errors import NotSupported
from rlk_kernels.integrations.families import ARCHITECTURES
from rlk_kernels.integrations.process_changes import change_process


def test_a_model_that_is_cast_later_keeps_exact_frequencies() -> None:
    """As trainers do (verl: `module.to(dtype)`): angles of frequencies in bf16 are others."""
    ids = torch.arange(50)[None]
    late, early = small_model(), small_model().to(torch.bfloat16)
    hf.use_kernels(late)
    late.to(torch.bfloat16)
    early.model.rotary_emb.float()
    hf.use_kernels(early)
    assert late.model.rotary_emb.inv_freq.dtype == torch.float32
    assert late.lm_head.weight.dtype == torch.bfloat16
    with torch.no_grad():
        assert late(ids, use_cache=False).logits.equal(early(ids, use_cache=False).logits)


def test_frequencies_outlast_a_model_without_memory() -> None:
    """As trainers make it on all ranks but the first: on the meta device, then empty."""
    with torch.device("meta"):
        model = small_model()
    hf.use_kernels(model)
    model.to_empty(device="cpu")
    whole = small_model()
    hf.use_kernels(whole)
    assert model.model.rotary_emb.inv_freq.equal(whole.model.rotary_emb.inv_freq)


def test_the_scaling_is_that_of_the_live_module_until_the_kernels_are_out() -> None:
    ids, model = torch.arange(50)[None], small_model()
    stock = model.model.rotary_emb.attention_scaling
    undo = hf.use_kernels(model)
    with torch.no_grad():
        before = model(ids, use_cache=False).logits
        model.model.rotary_emb.attention_scaling = 1.0
        assert not model(ids, use_cache=False).logits.equal(before)
        model.model.rotary_emb.attention_scaling = stock
        assert model(ids, use_cache=False).logits.equal(before)
    undo.close()
    assert model.model.rotary_emb.attention_scaling == stock


def test_what_is_changed_for_the_process_is_undone_with_the_last_model() -> None:
    done: list[str] = []

    def change() -> Callable[[], None]:
        done.append("changed")
        return lambda: done.append("undone")

    first, second = change_process("it", change), change_process("it", change)
    first()
    assert done == ["changed"]
    second()
    assert done == ["changed", "undone"]
    change_process("it", change)()
    assert done == ["changed", "undone"] * 2


def test_autocast_computes_as_a_model_of_its_dtype() -> None:
    """As HF Trainer and TRL run fp32 weights with `bf16=True`; gradients reach the fp32 weights."""
    ids = torch.arange(50)[None]
    master, plain = small_model(), small_model().to(torch.bfloat16)
    for model in (master, plain):
        hf.use_kernels(model)
    with torch.autocast("cpu", torch.bfloat16):
        logits = master(ids, use_cache=False).logits
    assert logits.equal(plain(ids, use_cache=False).logits)
    assert not logits.equal(master(ids, use_cache=False).logits)
    for model in (master, plain):
        with torch.autocast("cpu", torch.bfloat16, enabled=model is master):
            logits = model(ids, use_cache=False).logits[0]
        hf.token_logprobs(logits, ids[0]).sum().backward()
    for name, weight in master.named_parameters():
        assert weight.grad.dtype == torch.float32, name
        assert weight.grad.equal(plain.get_parameter(name).grad.float()), name


def test_neighbours_are_pairs_in_a_family_that_interleaves_them() -> None:
    ids, rope = torch.arange(50)[None], {"rope_type": "default", "rope_theta": 1e4}
    here = {"head_dim": 32, "tie_word_embeddings": False, "rope_parameters": rope}
    ours, stock = (small_model("Ernie4_5", **here) for _ in range(2))
    halves = small_model(**here, rms_norm_eps=stock.config.rms_norm_eps)
    halves.load_state_dict(stock.state_dict())
    for model in (ours, halves):
        hf.use_kernels(model)
    with torch.no_grad():
        logits = [model(ids, use_cache=False).logits for model in (ours, halves, stock)]
    assert torch.allclose(logits[0], logits[2], atol=1e-4)
    assert not torch.allclose(logits[1], logits[2], atol=1e-3)


@pytest.mark.parametrize("where", ["model.layers.0.self_attn.q_proj", "lm_head"])
def test_what_stands_in_the_place_of_a_linear_is_refused(where: str) -> None:
    class Adapter(torch.nn.Linear):
        pass

    model = small_model()
    model.get_submodule(where).__class__ = Adapter
    with pytest.raises(NotSupported, match=r"Adapter; only a torch\.nn\.Linear is supported"):
        hf.use_kernels(model)
    assert type(model.model.norm).__name__ == "LlamaRMSNorm"


def test_what_is_no_causal_model_is_refused() -> None:
    model = small_model()
    for other, kind in (
        (model.model, "LlamaModel"),
        (torch.nn.DataParallel(model), "DataParallel"),
    ):
        for ask in (hf.use_kernels, hf.operators):
            with pytest.raises(NotSupported, match=f"a {kind} is not supported"):
                ask(other)


def test_a_model_of_another_family_is_refused_by_those_that_are_served() -> None:
    gpt2 = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2)
    )
    cohere = small_model("Cohere")
    for model, named in ((gpt2, "GPT2LMHeadModel"), (cohere, r"CohereForCausalLM \(cohere\)")):
        served = rf"^a {named} is not supported; .* of model_type {', '.join(ARCHITECTURES)} are$"
        with pytest.raises(NotSupported, match=served):
            hf.use_kernels(model)


def test_the_loss_of_labels_is_of_our_log_probs() -> None:
    model, plain = small_model(), small_model()
    stock = type(model).loss_function.fget(model)
    undo = hf.use_kernels(model)
    ids = torch.arange(24).view(2, 12)
    one = torch.full_like(ids, -100)
    one[1, 7] = ids[1, 7]
    out = model(ids, labels=one, use_cache=False)
    assert out.loss.equal(-hf.token_logprobs(out.logits[1, 6:7], ids[1, 7:8])[0])
    some = ids.clone()
    some[0, :5] = -100
    gradients = []
    for count in (None, 7, torch.tensor(7)):
        model.zero_grad()
        out = model(ids, labels=some, use_cache=False, num_items_in_batch=count)
        out.loss.backward()
        gradients.append(model.lm_head.weight.grad)
        rows = hf.token_logprobs(out.logits[:, :-1].flatten(0, 1), some[:, 1:].flatten())
        chosen = rows[some[:, 1:].flatten() >= 0]
        assert len(chosen) == 18
        near = -chosen.double().sum() / (len(chosen) if count is None else 7)
        assert abs(out.loss.item() - near.item()) < 1e-5
        theirs = plain(ids, labels=some, use_cache=False, num_items_in_batch=count).loss
        assert abs(out.loss.item() - theirs.item()) < 1e-4
    assert gradients[1].equal(gradients[2])
    assert not gradients[0].equal(gradients[1])
    for label in (-1, 64):
        one[1, 7] = label
        with pytest.raises(IndexError):
            model(ids, labels=one, use_cache=False)
    undo.close()
    assert model.loss_function is stock
    without_logits = small_model()
    hf.use_kernels(without_logits, excluded=["logits"])
    assert without_logits.loss_function is stock
