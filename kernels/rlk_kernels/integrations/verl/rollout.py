"""What verl's vLLM workers are asked: do they run the kernels, and hold the trainer's weights?"""

from typing import Any

from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from rlk_kernels.integrations.errors import NotSupported
from rlk_kernels.integrations.frameworks import differences


class WorkerExtension(vLLMColocateWorkerExtension):
    """vLLM's worker gets these methods besides verl's."""

    def rlk_check(self, digests: dict[str, bytes], generated: bool) -> None:
        """Raises NotSupported where an operator of the live model is not computed by its kernel,
        where a kernel was never called although the model has `generated`, and where a parameter
        does not have the digests that the trainer sent."""
        from rlk_kernels.integrations.vllm.registry import check_model
        from rlk_kernels.integrations.vllm.weights import held

        model: Any = self.model_runner.get_model()
        found = check_model(model, called=generated)
        tied = getattr(model.config, "tie_word_embeddings", False)
        if wrong := differences(digests, held(model), tied):
            raise NotSupported(
                f"the rollout does not hold the trainer's weights: {'; '.join(wrong)}"
            )
        if self.rank == 0:
            print(
                f"rlk_kernels in verl's rollout: the kernels compute {len(found.replaced)} "
                f"operators of {type(model).__name__}"
                f"{', and each was called' if generated and model.model.do_not_compile else ''}; "
                f"{len(digests)} parameters are the trainer's, bit for bit",
                flush=True,
            )
