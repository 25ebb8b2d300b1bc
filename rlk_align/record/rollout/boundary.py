"""An engine whose compiled code, or whose captured graphs, no tap looks into."""

from rlk_align.engines.base import Engine
from rlk_align.model.sites import model_sites
from rlk_align.trace.schema import COMPILED


class Boundary(Engine):
    """A live engine that shows, where it is compiled, what lies at its boundary alone: tokens and
    log-probs."""

    compiled: bool

    def unexposed(self, kind: str) -> dict[str, str]:
        hidden = super().unexposed(kind)
        if not self.compiled:
            return hidden
        sites = [site.name for site in model_sites(self.shape) if site.name != "logprob"]
        return dict.fromkeys(sites, COMPILED) | hidden
