"""The tensors of a checkpoint: those that its config requires, compared with those in its files.

An engine fills in a default or random numbers for a missing tensor, often without an error, and two
such engines may even agree. The tensors are therefore checked before any engine starts.

The check ignores `*.rotary_emb.inv_freq`, which follows from the config, layers after the
decoder's, which predict several tokens ahead, and the part for images of a checkpoint that sees
them. A tied head may be missing, and must equal the embedding if it is stored. Quantized
checkpoints have other tensors, and are refused.
"""

from collections.abc import Sequence
from pathlib import Path

from rlk_align.errors import ModelError
from rlk_align.model.checkpoint import decoder, read_config, tensor_name
from rlk_align.model.quantised import E4M3, refused
from rlk_align.model.shape import ModelShape, is_tied, predictor_layers
from rlk_align.model.sites import model_sites, site_parameters
from rlk_align.model.stored import STORED_DTYPES, StoredTensor, stored_tensors

_MAX_NAMED = 4
"""The largest number of tensors of a kind that an error lists; the others are counted."""


def expected_tensors(config: dict, shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor that the config requires, including a tied head."""
    shapes: dict[str, tuple[int, ...]] = {}
    biased = biased_operators(config, shape)
    for site in sorted(model_sites(shape), key=lambda s: s.layer is not None):
        dimensions = tuple(shape.at(site.layer).size(d) for d in site.operator.weight)
        for parameter in site_parameters(site, shape):
            shapes[tensor_name(parameter, shape.family.modules)] = dimensions
            if site.operator.name in biased:
                bias = tensor_name(f"{parameter}.bias", shape.family.modules)
                shapes[bias] = dimensions[:1]
    return shapes


def biased_operators(config: dict, shape: ModelShape) -> frozenset[str]:
    """The operators that have a bias, e.g. `q_proj`."""
    config = {**shape.family.defaults, **config}
    keys = {o.name: o.bias for _, o in shape.operators() if o.bias} | dict(shape.family.biases)
    has = {n: config.get(key) if isinstance(key, str) else key for n, key in keys.items()}
    return frozenset(n for n, biased in has.items() if biased)


def check_tensors(model: Path, shape: ModelShape) -> None:
    """Raises ModelError for tensors that are missing, unexpected, of another shape, or quantised
    in a format that is not read, and for a tied head that is stored and differs from the
    embedding."""
    config = read_config(model)
    expected = expected_tensors(config, shape)
    stored = stored_tensors(model, shape.family.modules, shape.fused_rows, shape.family.stacks)
    _check_dtypes(model, [stored[name] for name in expected if name in stored])
    head, tied = tensor_name("lm_head"), is_tied(config)
    missing = [n for n in expected if n not in stored and not (tied and n == head)]
    ignored = beside_decoder(model, shape)
    unexpected = [
        n
        for n in stored
        if n not in expected and not n.endswith(".inv_freq") and not n.startswith(ignored)
    ]
    misshapen = [n for n in expected if n in stored and stored[n].shape != expected[n]]
    # The first wrong part of each stack.
    by_tensor = {stored[n].name: n for n in reversed(misshapen)}
    shaped = [
        f"{tensor}{'' if tensor == n else f' (as {n})'} {list(stored[n].shape)} instead of "
        f"{list(expected[n])}"
        for tensor, n in reversed(by_tensor.items())
    ]
    kinds = {"lacks": missing, "has, and its config does not ask for,": unexpected}
    wrong = [f"{verb} {_list(names)}" for verb, names in kinds.items() if names]
    wrong += [f"has other shapes: {_list(shaped)}"] if shaped else []
    if (
        not wrong
        and tied
        and head in stored
        and not _same_values(stored[head], stored[tensor_name("embed")])
    ):
        wrong = [f"ties its head to the embedding, but stores another {head}"]
    if wrong:
        raise ModelError(
            f"{model}: the checkpoint {'; it '.join(wrong)}",
            "it is incomplete, or its config.json belongs to another model",
        )


def beside_decoder(model: Path, shape: ModelShape) -> tuple[str, ...]:
    """What the names of the tensors start with that a checkpoint may have beside its decoder: for
    images, and of layers that predict further tokens."""
    more = range(shape.layers, shape.layers + predictor_layers(read_config(model)))
    starts = tuple(f"model.layers.{i}." for i in more)
    starts += (shape.family.ignored,) if shape.family.ignored else ()
    alone = decoder(model)
    return starts + (alone.images if alone else ())


def _check_dtypes(model: Path, tensors: Sequence[StoredTensor]) -> None:
    """Raises ModelError if weights are stored in a dtype that no engine computes in."""
    foreign = {
        t.name: t.dtype for t in tensors if t.dtype not in STORED_DTYPES and t.scales is None
    }
    if foreign:
        name, dtype = next(iter(foreign.items()))
        lacks = ", without scales" if dtype == E4M3 else ""
        what = f"{name} is stored as {dtype}{lacks}, one of {len(foreign):,} such"
        raise refused(model, what)


def _list(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + more


def _same_values(a: StoredTensor, b: StoredTensor) -> bool:
    """Whether two matrices have the same dtype, shape and bits."""
    import torch

    bits_a, bits_b = (tensor.load().view(torch.uint8) for tensor in (a, b))
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(bits_a, bits_b)
