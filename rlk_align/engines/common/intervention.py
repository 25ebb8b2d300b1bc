"""An intervention: the sites that a pass overwrites as the engine computes, and with what."""

from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class RecordedPass(BaseModel):
    """A pass of a trace."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    folder: Path
    """The trace's folder."""
    passname: str


class Intervention(BaseModel):
    """Overwrites values of sites after they were observed; later operators read the new ones."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["graft", "shift", "perturb"]
    """`graft`: the source's recorded value. `shift`: the live value plus source minus base, in
    float64, rounded once. `perturb`: each element is moved by `ulps` units in the last place, up or
    down by a hash of (seed, site, sample, position, feature)."""
    sites: tuple[str, ...] | None = None
    """The sites to overwrite; None means all sites."""
    source: RecordedPass | None = None
    base: RecordedPass | None = None
    ulps: int = Field(default=1, ge=1)
    seed: int = 0
    late: tuple[str, ...] = ()
    """Sites that are overwritten only after the unit that follows them was computed: they are
    inside a region that an engine computes as one."""
    observed: bool = True
    """Whether the pass records every site, or only its log-probs."""

    @model_validator(mode="after")
    def _has_its_sources(self) -> Self:
        has = (self.source is not None, self.base is not None)
        wanted = {"graft": (True, False), "shift": (True, True), "perturb": (False, False)}
        if has != wanted[self.kind]:
            raise ValueError(f"{self.kind}: source or base is missing, or not expected")
        return self
