"""The policy's server of verl: the environment that it gives vLLM, and vLLM's workers."""

import os

from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

from rlk_kernels.integrations.frameworks import refuse
from rlk_kernels.integrations.verl import settings


class Server(vLLMHttpServer):
    def _validate_configs(self) -> None:
        """Raises NotSupported for variables of this process, which vLLM's processes inherit."""
        refuse("verl's vLLM server", settings.refused_variables(os.environ))
        super()._validate_configs()

    def _get_worker_extension_cls(self) -> str:
        return "rlk_kernels.integrations.verl.rollout.WorkerExtension"
