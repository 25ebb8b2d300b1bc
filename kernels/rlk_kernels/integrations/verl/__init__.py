"""The kernels in verl: the trainer by verl's own switch, the rollout by vLLM's plugin.

    RLK_KERNELS=1 python -m verl.trainer.main_ppo \\
      actor_rollout_ref.model.external_lib=rlk_kernels.integrations.verl ...

verl imports this module in each of its processes, and importing it is the switch. Before a worker
or a server starts, settings with which the two sides would differ are refused as one list. The
FSDP2 worker's model then gets the kernels, and its log-probs; at the first two copies of weights to
the rollout, digests of every row are compared; and the run ends with an error if an operator has
not got its kernel, or was never called. `check(config)` is the first of these alone.
"""

import os
from typing import Any

from rlk_kernels.integrations.verl.hooks import install

__all__ = ["check"]


def check(config: Any) -> None:
    """Raises NotSupported with all that is refused in verl's whole configuration and in the
    environment of this process. Imports neither verl nor Ray."""
    from rlk_kernels.integrations.verl import settings

    settings.check(config, os.environ)


install()
