"""The canonical operators of a decoder transformer, in execution order.

A site is the output of one operator, `[tokens, features]`. A unit is an operator with its inputs,
which are sites as well. Their graph determines whether a unit introduces a difference (inputs
equal, outputs differ) or inherits it. The graph follows from the operators that a family lists.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rlk_align.errors import BadOption
from rlk_align.model.operators import OpClass, Operator
from rlk_align.model.prompts import TokenBatch
from rlk_align.model.shape import ModelShape

_ROUTING = frozenset({"router", "top_k", "routing_weights", "combine"})
"""The formulas of a sparse layer's operators that have a row for each token, without slots."""


@dataclass(frozen=True, slots=True)
class Site:
    """One canonical operator's output."""

    name: str
    """E.g. `layers.3.down_proj`."""
    layer: int | None
    operator: Operator
    inputs: tuple[str, ...]
    """Sites whose row p the operator reads for its own row p."""
    prefix_inputs: tuple[str, ...]
    """Sites of which it reads every row up to and including p: attention's k and v."""
    features: int
    experts: str = ""
    """The site with the expert of each slot of its rows."""

    @property
    def op(self) -> str:
        """The name without its layer, e.g. `down_proj`."""
        return self.operator.site

    @property
    def op_class(self) -> OpClass:
        return self.operator.op_class

    @property
    def parameter(self) -> str:
        """The canonical name of its weight, if it has one."""
        return self.operator.parameter or self.name

    @property
    def sparse(self) -> bool:
        """Whether it belongs to the router or to the experts of a sparse layer."""
        return bool(self.experts) or self.operator.formula in _ROUTING

    @property
    def sampled_rows_only(self) -> bool:
        """Whether its rows exist only where the next token was sampled."""
        return self.operator.row == "sampled token"


def model_sites(shape: ModelShape) -> list[Site]:
    """Every site of a model of that shape, in execution order."""
    sites: list[Site] = []
    producer: dict[str, str] = {}
    """Value -> the last site that computed it."""
    for layer, operator in shape.operators():
        name = operator.site if layer is None else f"layers.{layer}.{operator.site}"
        # An operator outside of the layers reads what the catalogue says.
        reads = {} if layer is None else shape.family.reads
        inputs, prefixes = (
            tuple(producer[reads.get(value, value)] for value in values)
            for values in (operator.inputs, operator.prefix_inputs)
        )
        features = shape.at(layer).size(operator.features)
        experts = producer[operator.slots_of] if operator.slots_of else ""
        sites.append(Site(name, layer, operator, inputs, prefixes, features, experts))
        producer[operator.output] = name
    return sites


def first_attention(shape: ModelShape) -> Site:
    """The first attention, on which positions and boundaries are measured."""
    formulas = ("attention", "latent_attention")
    return next(s for s in model_sites(shape) if s.operator.formula in formulas)


def site_parameters(site: Site, shape: ModelShape) -> tuple[str, ...]:
    """The canonical names of a site's weights: one, one for each expert, or none."""
    if not site.operator.weight:
        return ()
    if not site.operator.of_expert:
        return (site.parameter,)
    return tuple(f"layers.{site.layer}.experts.{e}.{site.op}" for e in range(shape.experts))


def check_selection(chosen: tuple[str, ...], sites: list[Site]) -> None:
    """Raises BadOption for a chosen name that is neither a site nor an operator."""
    known = {s.name for s in sites} | {s.op for s in sites}
    for name in chosen:
        if name not in known:
            ops = ", ".join(dict.fromkeys(s.op for s in sites))
            raise BadOption(f"--sites: {name!r} is not a site of this model", f"operators: {ops}")


class RowIndex:
    """Numbers every (sample, position) of a batch: row = offset[sample] + position."""

    def __init__(self, batch: TokenBatch) -> None:
        self.batch = batch
        lengths = np.array([len(s.ids) for s in batch.samples], dtype=np.int64)
        self.offsets = np.concatenate([[0], np.cumsum(lengths)])
        self.token = np.concatenate([np.array(s.ids, dtype=np.int64) for s in batch.samples])
        """The id at each row."""
        self.sample = np.repeat(np.arange(len(lengths)), lengths)
        self.position = np.arange(len(self)) - self.offsets[self.sample]

    def __len__(self) -> int:
        return int(self.offsets[-1])

    def rows(self, sample: np.ndarray, position: np.ndarray) -> np.ndarray:
        """The row numbers of (sample, position) pairs, -1 for a pair outside the batch."""
        known = (sample >= 0) & (sample < len(self.offsets) - 1) & (position >= 0)
        base = self.offsets[np.where(known, sample, 0)]
        end = self.offsets[np.where(known, sample, 0) + 1]
        row = base + position
        return np.where(known & (row < end), row, -1)

    @cached_property
    def counted(self) -> np.ndarray:
        """A mask of the rows whose log-prob, which is that of the next token, counts: the token was
        sampled, and the mask of its dump includes it."""
        mask = np.zeros(len(self), dtype=bool)
        for s, start in zip(self.batch.samples, self.offsets, strict=False):
            rows = s.sampled_positions
            mask[start + rows.start : start + rows.stop] = s.counted is None or s.counted
        return mask

    @cached_property
    def prefixes(self) -> np.ndarray:
        """For each row the number of its tokens so far, int64: rows have the same number if their
        samples have the same tokens up to them."""
        known: dict[tuple[int, int], int] = {}
        numbers = []
        for s in self.batch.samples:
            number = -1
            for token in s.ids:
                number = known.setdefault((number, token), len(known))
                numbers.append(number)
        return np.array(numbers, dtype=np.int64)

    def locate(self, row: int) -> tuple[int, int]:
        """The (sample, position) of a row number."""
        return int(self.sample[row]), int(self.position[row])

    def expected(self, site: Site, decode: bool) -> np.ndarray:
        """A mask of the rows that a complete pass has of a site.

        Sites of the hidden states have every position, except that in a decode pass the last
        sampled token never enters the model. Logits and log-probs at position p belong to token
        p+1, and exist if that token was sampled.
        """
        mask = np.zeros(len(self), dtype=bool)
        for s, start in zip(self.batch.samples, self.offsets, strict=False):
            first = len(s.prompt_ids) - 1 if site.sampled_rows_only else 0
            last = len(s.ids) - (1 if site.sampled_rows_only or decode else 0)
            mask[start + first : start + last] = True
        return mask

    def same_tokens(self, other: TokenBatch) -> np.ndarray:
        """A mask of the rows at which another batch has the same token id."""
        same = np.zeros(len(self), dtype=bool)
        for start, x, y in zip(self.offsets, self.batch.samples, other.samples, strict=False):
            length = min(len(x.ids), len(y.ids))
            same[start : start + length] = np.array(x.ids[:length]) == np.array(y.ids[:length])
        return same

    def prefix_all(self, good: np.ndarray) -> np.ndarray:
        """For each row, whether `good` holds at it and at every earlier row of its sample."""
        bad = np.concatenate([[0], np.cumsum(~good)])
        return (bad[1:] - bad[self.offsets[self.sample]]) == 0
