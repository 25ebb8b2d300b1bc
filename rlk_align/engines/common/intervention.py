"""What a pass overwrites as the engine computes, instead of only observing it."""

from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Source(BaseModel):
    """A recorded pass."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    folder: Path
    """The trace's."""
    passname: str


class Intervention(BaseModel):
    """After a site's live value has been observed, another one overwrites it, which all that
    follows then reads."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["graft", "shift", "perturb"]
    """`graft`: the source's recorded value. `shift`: the live value plus source minus base, in
    float64, rounded once. `perturb`: each element moved by some units in the last place, up or
    down by a hash of (seed, site, sample, position, feature)."""
    sites: tuple[str, ...] | None = None
    """None is all of them."""
    source: Source | None = None
    base: Source | None = None
    ulps: int = Field(default=1, ge=1)
    seed: int = 0
    late: tuple[str, ...] = ()
    """Sites that are overwritten only once the unit after them has been computed: the inside of a
    region that an engine computes as one."""
    observed: bool = True
    """Whether the pass records every site, or its log-probs alone."""

    @model_validator(mode="after")
    def _has_its_sources(self) -> Self:
        has = (self.source is not None, self.base is not None)
        wanted = {"graft": (True, False), "shift": (True, True), "perturb": (False, False)}
        if has != wanted[self.kind]:
            raise ValueError(f"{self.kind}: a source or a base too few or too many")
        return self
