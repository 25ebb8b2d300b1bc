"""The records of a perturbation: how far an engine's response to it grows, unit by unit."""

from rlk_align.results import Count, Result, SideName, Size


class Response(Result):
    """One unit of a perturbed pass."""

    name: str
    """The unit's."""
    rel_l2: Size
    """How far its output is from the engine's own: the L2 norm of the difference over that of the
    output, the largest of its outputs'."""
    inputs_rel_l2: Size
    """How far its inputs are from the engine's own, likewise."""

    @property
    def gain(self) -> float | None:
        """The one over the other; None where its inputs are not perturbed."""
        return self.rel_l2 / self.inputs_rel_l2 if self.inputs_rel_l2 else None


class Amplification(Result):
    """An engine's response to a perturbation of its own rounding's size."""

    side: SideName
    passname: str
    perturbed: str
    """The site whose every element was moved by some units in the last place, up or down."""
    ulps: Count
    seed: int
    rel_l2: Size
    """The perturbation, relative to the site's value."""
    responses: list[Response]
    """The responses of the units that read it, directly or not, in execution order."""
    mean_abs_dlogp: Size
    max_abs_dlogp: Size

    @property
    def largest(self) -> Response | None:
        """The largest amplifier: the operator with the largest gain of its own. Log-probs, small
        where tokens are likely, are what is measured, so they do not count as one."""
        amplifying = [r for r in self.responses if r.gain is not None and r.name != "logprob"]
        return max(amplifying, key=lambda r: r.gain or 0.0, default=None)

    @property
    def gain(self) -> float:
        """The largest difference that the perturbation grew to, over the perturbation."""
        return max((r.rel_l2 for r in self.responses), default=0.0) / (self.rel_l2 or 1.0)
