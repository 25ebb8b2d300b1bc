"""vLLM on a CPU with what its build lacks for fp8: the quantisers of weights and activations, and
their products, in PyTorch. Its layers, loaders and methods are its own. The formulas are those of
vLLM 0.26 on Hopper GPUs, with a scale for each token and without DeepGEMM."""

import os

import torch

from rlk_align.engines.vllm.engine import VLLMEngine

E4M3, MAX = torch.float8_e4m3fn, 448.0


def quantise(
    x, scale=None, num_token_padding=None, scale_ub=None, use_per_token_if_dynamic=False,
    output=None, group_shape=None,
):  # fmt: skip
    """In the place of `vllm._custom_ops.scaled_fp8_quant`: x / s by row, and x · (1 / s) by one
    scale. Padding is zeros."""
    rows = max(num_token_padding or 0, len(x))
    out = torch.zeros(rows, x.shape[1], dtype=E4M3) if output is None else output
    wide = x.float()
    if scale is None and use_per_token_if_dynamic:
        most = torch.nn.functional.pad(wide.abs().amax(dim=1), (0, rows - len(x)), value=1.0)
        scale = (most[:, None] / MAX).clamp(min=1 / (MAX * 512))
        scaled = wide / scale[: len(x)]
    else:
        scale = (wide.abs().max() / MAX).reshape(1) if scale is None else scale
        scaled = wide * scale.float().reshape(-1)[0].reciprocal()
    out[: len(x)] = scaled.clamp(-MAX, MAX).to(E4M3)
    return out, scale


class FP8Engine(VLLMEngine):
    """`vllm_fp8`: takes the options of `vllm`."""

    def open(self) -> None:
        os.environ["VLLM_USE_DEEP_GEMM"] = "0"
        # Attention on AMX drops small products of an fp8 cache; that on AVX-512 does not.
        torch.cpu._is_amx_tile_supported = lambda: False
        from vllm import _custom_ops
        from vllm.model_executor.kernels import linear
        from vllm.model_executor.kernels.linear.scaled_mm import BlockScaledMMLinearKernel as block
        from vllm.model_executor.layers.quantization import fp8
        from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
        from vllm.model_executor.layers.quantization.online import fp8 as online
        from vllm.platforms import PlatformEnum

        class Product(linear.PerTensorTorchFP8ScaledMMLinearKernel):
            """With scales of tensors, rows and tokens. torch's own is slow on a CPU."""

            @classmethod
            def can_implement(cls, c):
                return True, None

            def apply_scaled_mm(self, *, A, B, out_dtype, As, Bs, bias, output_shape):
                n = output_shape[0]
                of_rows = As[:n] if As.numel() > 1 else As
                out = (A[:n].float() @ B.float()) * of_rows * Bs.reshape(1, -1)
                return (out if bias is None else out + bias).to(out_dtype).view(*output_shape)

        class BlockProduct(block.Fp8BlockScaledMMLinearKernel):
            """With blocks of 128 columns, added up in float32."""

            @classmethod
            def is_supported(cls, compute_capability=None):
                return True, None

            def apply_block_scaled_mm(self, A, B, As, Bs):
                out = torch.zeros(len(A), len(B))
                rows = Bs.repeat_interleave(self.weight_group_shape.row, 0)[: len(B)]
                for i in range(As.shape[1]):
                    at = slice(i * 128, (i + 1) * 128)
                    out += A[:, at].float() @ B[:, at].float().T * As[:, i : i + 1] * rows[:, i]
                return out.to(self.config.out_dtype)

        def forward(self, x, scale=None, scale_ub=None, use_triton=False):
            native = self.is_group_quant and not self.static
            return (self.forward_native if native else self.forward_cuda)(x, scale, scale_ub)

        _custom_ops.scaled_fp8_quant = quantise
        QuantFP8.forward_cpu = forward
        linear._POSSIBLE_FP8_KERNELS[PlatformEnum.CPU] = [Product]
        linear._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU] = [BlockProduct]
        fp8.cutlass_fp8_supported = lambda: True
        online.Fp8PerTensorOnlineLinearMethod.activation_quant_key = online.kFp8DynamicTokenSym
        super().open()
