"""vLLM on a CPU with what its build lacks for fp8: the quantisers of `_C`, and a product of blocks.
The formulas are those of vLLM 0.26's kernels for Hopper GPUs."""

import os

import torch

from rlk_align.engines.vllm.engine import VLLMEngine

E4M3, MAX = torch.float8_e4m3fn, 448.0


def _e4m3(scaled: torch.Tensor) -> torch.Tensor:
    return scaled.clamp(-MAX, MAX).to(E4M3)


def static_quant(out, x, scale, group_shape=None):
    """x · (1 / s), as vLLM's kernel for a known scale."""
    out.copy_(_e4m3(x.float() * (1.0 / scale.float().reshape(-1)[0])))


def tensor_quant(out, x, scale):
    scale.copy_(x.float().abs().max() / MAX)
    out[: len(x)] = _e4m3(x.float() * (1.0 / scale))


def token_quant(out, x, scale, scale_ub=None):
    """x / s with a scale for each row; rows beyond those of x are padding."""
    n = len(x)
    scale.fill_(1.0)
    most = x.float().abs().amax(dim=1, keepdim=True)
    scale[:n] = (most / MAX).clamp(min=1 / (MAX * 512))
    out.zero_()
    out[:n] = _e4m3(x.float() / scale[:n])


class FP8Engine(VLLMEngine):
    """`vllm_fp8`: takes the options of `vllm`."""

    def open(self) -> None:
        os.environ["VLLM_USE_DEEP_GEMM"] = "0"
        from vllm import _custom_ops as ops
        from vllm.model_executor.kernels import linear
        from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import (
            Fp8BlockScaledMMLinearKernel,
        )
        from vllm.model_executor.layers.quantization import fp8
        from vllm.model_executor.layers.quantization.online import fp8 as online
        from vllm.platforms import PlatformEnum

        class BlockProduct(Fp8BlockScaledMMLinearKernel):
            """Blocks of 128 columns, added up in float32."""

            @classmethod
            def is_supported(cls, compute_capability=None):
                return True, None

            def apply_block_scaled_mm(self, A, B, As, Bs):
                out = torch.zeros(len(A), len(B))
                rows = Bs.repeat_interleave(self.weight_group_shape.row, 0)[: len(B)]
                for i in range(As.shape[1]):
                    at = slice(i * 128, (i + 1) * 128)
                    part = A[:, at].float() @ B[:, at].float().T
                    out += part * As[:, i : i + 1] * rows[:, i]
                return out.to(self.config.out_dtype)

        def quantise(x, scale=None, num_token_padding=None, scale_ub=None,
                     use_per_token_if_dynamic=False, output=None, group_shape=None):  # fmt: skip
            rows = max(num_token_padding or 0, len(x))
            out = torch.zeros(rows, x.shape[1], dtype=E4M3) if output is None else output
            if scale is not None:
                static_quant(out[: len(x)], x, scale)
            elif use_per_token_if_dynamic:
                scale = torch.empty(rows, 1)
                token_quant(out, x, scale)
            else:
                scale = torch.empty(1)
                tensor_quant(out, x, scale)
            return out, scale

        class Product(linear.PerTensorTorchFP8ScaledMMLinearKernel):
            """Scales of tensors, rows and tokens: torch._scaled_mm is slow on a CPU."""

            @classmethod
            def can_implement(cls, c):
                return True, None

            def apply_scaled_mm(self, *, A, B, out_dtype, As, Bs, bias, output_shape):
                n = output_shape[0]
                of_rows = As[:n] if As.numel() > 1 else As
                out = (A[:n].float() @ B.float()) * of_rows * Bs.reshape(1, -1)
                out = out if bias is None else out + bias
                return out.to(out_dtype).view(*output_shape)

        ops.scaled_fp8_quant = quantise
        cpu = PlatformEnum.CPU
        linear._POSSIBLE_FP8_KERNELS[cpu] = [Product]
        linear._POSSIBLE_FP8_BLOCK_KERNELS[cpu] = [BlockProduct]
        # As on Hopper: a scale for each token.
        fp8.cutlass_fp8_supported = lambda: True
        token = online.kFp8DynamicTokenSym
        online.Fp8PerTensorOnlineLinearMethod.activation_quant_key = token
        from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8

        def forward(self, x, scale=None, scale_ub=None, use_triton=False):
            native = self.is_group_quant and not self.static
            of = self.forward_native if native else self.forward_cuda
            return of(x, scale, scale_ub)

        QuantFP8.forward_cpu = forward
        super().open()
