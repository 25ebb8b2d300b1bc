"""The records of a perturbation: how far an engine's response to it grows, unit by unit."""

from rlk_align.results import Count, Result, SideName, Size


class Response(Result):
    """The response of one unit in a perturbed pass."""

    name: str
    """The unit's name."""
    rel_l2: Size
    """The distance of its output from the unperturbed one: the L2 norm of the difference over that
    of the output. If the unit has several outputs, the largest distance counts."""
    inputs_rel_l2: Size
    """The distance of its inputs from the unperturbed ones, measured likewise."""

    @property
    def gain(self) -> float | None:
        """`rel_l2` over `inputs_rel_l2`; None if the inputs are not perturbed."""
        return self.rel_l2 / self.inputs_rel_l2 if self.inputs_rel_l2 else None


class Amplification(Result):
    """An engine's response to a perturbation of the size of its own rounding."""

    side: SideName
    passname: str
    perturbed: str
    """The site of which every element was moved up or down by `ulps` units in the last place."""
    ulps: Count
    seed: int
    rel_l2: Size
    """The size of the perturbation, relative to the site's value."""
    responses: list[Response]
    """The responses of the units that read the site, directly or not, in execution order."""
    mean_abs_dlogp: Size
    max_abs_dlogp: Size

    @property
    def largest(self) -> Response | None:
        """The operator with the largest gain of its own. The log-prob does not count: it is small
        if a token is likely, so its relative difference is large."""
        amplifying = [r for r in self.responses if r.gain is not None and r.name != "logprob"]
        return max(amplifying, key=lambda r: r.gain or 0.0, default=None)

    @property
    def gain(self) -> float:
        """The largest difference that the perturbation grew to, over the perturbation."""
        return max((r.rel_l2 for r in self.responses), default=0.0) / (self.rel_l2 or 1.0)
