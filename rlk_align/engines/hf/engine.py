"""HF transformers: a causal LM of any known family."""

import importlib.metadata
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import torch

from rlk_align.engines.base import Logprobs
from rlk_align.engines.common.attributes import (
    active_dropout,
    corrected_routing,
    norm_attributes,
    norm_epsilons,
    per_layer,
    plain_activation_name,
    processing,
    rope_attributes,
    rounded_frequencies,
)
from rlk_align.engines.common.edits import Editor
from rlk_align.engines.common.lora import LiveLora, record_adapter
from rlk_align.engines.common.parameters import LiveParameter, ParameterRecord, record_parameter
from rlk_align.engines.common.places import Place
from rlk_align.engines.common.rows import ForwardRows, padded_grid
from rlk_align.engines.common.site_hooks import ForwardHooks
from rlk_align.engines.common.transformers_rope import rotary_embeddings
from rlk_align.engines.common.user_patch import apply_patch
from rlk_align.engines.common.weights import unfused
from rlk_align.engines.forward_engine import ForwardEngine
from rlk_align.engines.hf.delta_net import delta_attributes
from rlk_align.engines.hf.experts import (
    corrections,
    expert_weights,
    mlp_path,
    router_of,
    sparse_blocks,
)
from rlk_align.engines.hf.lora import (
    MERGED,
    NAME,
    add_adapters,
    live_adapter,
    merge_adapter,
    name_of,
    use_adapter,
)
from rlk_align.engines.hf.mamba import mamba_attributes
from rlk_align.engines.hf.places import hf_places
from rlk_align.engines.hf.taps import HFTaps
from rlk_align.errors import ModelError
from rlk_align.model.adapter import adapter_paths
from rlk_align.model.checkpoint import decoder, read_config, transformers_config
from rlk_align.model.prompts import TokenBatch
from rlk_align.model.quantised import stored_format
from rlk_align.model.rotary import checkpoint_rotary
from rlk_align.model.shape import ModelShape
from rlk_align.model.vision import DECODER_NAMES
from rlk_align.text import one_line
from rlk_align.trace.schema import LoraRecord
from rlk_align.trace.writer import PassWriter


class HFEngine(ForwardEngine):
    """`hf:attn=eager|sdpa|...,batch=N,padding=right|left,temperature=T`.

    Scores teacher-forced, N sequences in each forward (by default 1, and so without padding), and
    decodes incrementally with a KV cache.
    """

    _unexposed: dict[str, str]
    _merged: LoraRecord | None = None
    """The adapter that was merged into the weights."""

    def open(self) -> None:
        here = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = torch.device(self.spec.device or here)
        self.model = self.load(self.compute_dtype).to(self.device)

    @property
    def compute_dtype(self) -> str:
        """The spec's dtype, or else the checkpoint's."""
        return self.spec.dtype(self.shape.dtype)

    adapter_in_float32 = True
    """Whether an adapter is float32 also where the model is not, as PEFT loads it by default."""

    def load(self, dtype: str) -> Any:
        """The model on the CPU in evaluation mode, with the kernels and the user's patch. Raises
        ModelError or BadOption."""
        from transformers import AutoModelForCausalLM

        try:
            model = AutoModelForCausalLM.from_pretrained(
                self.model_path,
                **self._decoder(),
                dtype=dtype,
                attn_implementation=self._attention(),
                **self._experts_implementation(),
                **self._dequantised(),
                local_files_only=True,
            )
        except Exception as error:
            # The rules by which transformers checks configs may raise any exception.
            raise ModelError(
                f"transformers could not load {self.model_path}: {one_line(error)}"
            ) from error
        if paths := [path for path in self._lora if path is not None]:
            add_adapters(model, paths, self.adapter_in_float32)
            if self.spec.option("merged"):
                live = live_adapter(model, hf_places(model, self.shape))
                record = record_adapter(paths[0], live, self.compute_dtype)
                self._merged = record.model_copy(update={"merged": MERGED})
                merge_adapter(model)
        if self.kernels is not None:
            self.kernels.in_model(model, model.config.rope_parameters)
        apply_patch(self.spec, model.eval())
        return model

    def _decoder(self) -> dict[str, Any]:
        """The arguments of `from_pretrained` for a checkpoint that also sees images."""
        if decoder(self.model_path) is None:
            return {}
        names = {f"^{re.escape(start)}": alone for start, alone in DECODER_NAMES.items()}
        return {"config": transformers_config(self.model_path), "key_mapping": names}

    def _attention(self) -> str | None:
        """The name of transformers' attention; None lets transformers choose."""
        if self.kernels is not None and "attn" not in self.kernels.excluded:
            return "eager"  # which every family has, and the kernels replace
        return str(self.spec.option("attn"))

    def _experts_implementation(self) -> dict[str, Any]:
        """The argument of `from_pretrained` for the experts of a sparse model."""
        if not self.shape.experts:
            return {}
        return {"experts_implementation": str(self.spec.option("experts"))}

    def _dequantised(self) -> dict[str, Any]:
        """The argument of `from_pretrained` for a checkpoint of fp8 in blocks: transformers
        dequantises the weights as it loads them, on a GPU too."""
        stored = stored_format(self.model_path, read_config(self.model_path))
        if stored is None:
            return {}
        from transformers import FineGrainedFP8Config

        settings = FineGrainedFP8Config(
            dequantize=True, modules_to_not_convert=list(stored.ignored) or None
        )
        return {"quantization_config": settings}

    def weights(self) -> Iterator[ParameterRecord]:
        return map(record_parameter, self.whole_parameters())

    def whole_parameters(self) -> Iterator[LiveParameter]:
        """Every canonical parameter, one at a time, as the engine computes with it. All ranks call
        this, and rank 0 alone yields."""
        own = unfused(self.model, self.places())
        for name, value in chain(own, expert_weights(self.model), corrections(self.model)):
            yield LiveParameter(name, value)

    @property
    def _lora(self) -> list[str | None]:
        """The adapters of samples in turn; empty without any."""
        lora = self.spec.option("lora")
        return adapter_paths(lora) if lora is not None else []

    def adapters(self) -> list[LoraRecord | None]:
        if self._merged is not None:
            return [self._merged]
        return [
            None if path is None else self._record_of(i, path) for i, path in enumerate(self._lora)
        ]

    def _record_of(self, number: int, path: str) -> LoraRecord:
        self._use_adapter_of(number)
        name = self._adapter_name(number) or NAME
        return record_adapter(path, self.live_adapter(name), self.compute_dtype)

    def _adapter_name(self, sample: int) -> str | None:
        """PEFT's name of a sample's adapter; None for none."""
        at = sample % len(self._lora)
        before = [path for path in self._lora[:at] if path is not None]
        return None if self._lora[at] is None else name_of(len(before))

    def _use_adapter_of(self, sample: int) -> None:
        """Gives the following forwards the adapter of a sample, if samples have several."""
        if len(self._lora) > 1:
            use_adapter(self.model, self._adapter_name(sample))

    def live_adapter(self, name: str = NAME) -> Iterator[LiveLora]:
        """The adapter of each projection, with the values that it computes with."""
        for each in live_adapter(self.model, self.places(), self.gathered, name):
            yield self.rounded(replace(each, kernels=True)) if self.kernels is not None else each

    def gathered(
        self, parameters: Iterable[torch.Tensor], written: bool = False
    ) -> AbstractContextManager[None]:
        """Within it these parameters are whole, where ranks share parts of them; all ranks enter
        it. `written`: what is written to them there is kept."""
        return nullcontext()

    def rounded(self, live: LiveLora) -> LiveLora:
        """An adapter whose factors the engine rounds to the dtype that it computes in."""
        compute = getattr(torch, self.compute_dtype)
        return replace(live, a=live.a.to(compute), b=live.b.to(compute))

    def version(self) -> str:
        import transformers

        if self.spec.option("lora") is None:
            return transformers.__version__
        return f"{transformers.__version__}, peft {importlib.metadata.version('peft')}"

    def dtype(self) -> str:
        return str(self.model.lm_head.weight.dtype).removeprefix("torch.")

    def attributes(self) -> dict[str, Any]:
        return {
            **hf_attributes(self.model, self.shape),
            **delta_attributes(self.model, self.compute_dtype),
            **mamba_attributes(self.model),
            **self._rounded_frequencies(),
            **processing(self.temperature, self.limits),
            # A forward of one sequence has no padding.
            "padding_side": self.spec.option("padding") if self.batch_size > 1 else None,
        }

    def _rounded_frequencies(self) -> dict[str, Any]:
        """The attribute of a rotary embedding whose inverse frequencies were rounded, as they are
        where a whole model is cast with its buffers."""
        rotary = checkpoint_rotary(self.model_path, self.shape)
        if rotary is None:
            return {}
        rope, live = rotary_embeddings(self.model)[0]
        return rounded_frequencies(live, rotary.inv_freq, float(rope["rope_theta"]))

    def tapped(self, tap: PassWriter | None, editor: Editor | None) -> ForwardHooks:
        hooks = HFTaps(self.model, self.places(), tap, editor)
        self._unexposed = hooks.unexposed
        return hooks

    def unexposed(self, kind: str) -> dict[str, str]:
        """The sites that the latest pass did not expose."""
        return dict(self._unexposed)

    def forward(self, batch: TokenBatch, members: Sequence[int], taps: ForwardHooks) -> Logprobs:
        self._use_adapter_of(members[0])
        side = str(self.spec.option("padding"))
        grid = padded_grid([(i, batch.samples[i]) for i in members], side)
        taps.at(grid.rows("batch first"), self.device)
        inputs = {"input_ids": torch.from_numpy(grid.ids)}
        if not grid.real.all():
            inputs["attention_mask"] = torch.from_numpy(grid.real.astype(np.int64))
            inputs["position_ids"] = torch.from_numpy(grid.positions)
        inputs = {name: value.to(self.device) for name, value in inputs.items()}
        logits = self.run_model(**inputs, use_cache=False).logits
        logprobs = {}
        for i, (k, first) in zip(members, grid.starts, strict=True):
            s = batch.samples[i]
            at = slice(s.sampled_positions.start + first, s.sampled_positions.stop + first)
            target = torch.tensor(s.response_ids, device=self.device)
            logprobs[i] = self.logprobs(logits[k, at], target)
        return logprobs

    def run_model(self, **inputs: Any) -> Any:
        """What scores calls: the model, or what is around it."""
        return self.model(**inputs)

    def places(self) -> Iterator[Place]:
        return hf_places(self.model, self.shape)

    @property
    def batch_size(self) -> int:
        return int(self.spec.option("batch") or 1)

    def step(
        self, taps: ForwardHooks, rows: ForwardRows, ids: Sequence[int], cache: Any
    ) -> tuple[torch.Tensor, Any]:
        self._use_adapter_of(int(rows.sample[0]))
        taps.at(rows, self.device)
        out = self.model(
            input_ids=torch.tensor([ids], device=self.device),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return out.logits[0], out.past_key_values

    def stop_ids(self) -> set[int]:
        return _eos_ids(self.model)


def _eos_ids(model: Any) -> set[int]:
    eos = model.generation_config.eos_token_id
    if eos is None:
        eos = model.config.eos_token_id
    return set() if eos is None else {eos} if isinstance(eos, int) else set(eos)


def hf_attributes(model: Any, shape: ModelShape) -> dict[str, Any]:
    """The settings of a live HF model that affect its numbers, beside its weights."""
    layers = list(model.model.layers)
    name, table = shape.family.parent("o_proj"), model.get_input_embeddings().weight
    parts: dict[int, Any] = {i: getattr(layer, name, None) for i, layer in enumerate(layers)}
    by_layer = {i: part for i, part in parts.items() if hasattr(part, "o_proj")}
    attention, numbers = list(by_layer.values()), list(by_layer)

    def of_attention(name: str, values: list[Any]) -> dict[str, Any]:
        return per_layer(name, values, numbers)

    every = ((i, getattr(layer, mlp_path(layer))) for i, layer in enumerate(layers))
    mlps = {i: mlp for i, mlp in every if shape.has_mlp(i)}
    dtype = model.lm_head.weight.dtype
    return {
        "layers": len(layers),
        "hidden_size": table.shape[1],
        "vocab_size": table.shape[0],
        **of_attention("heads", [_heads(a, "q_proj", "num_attention_heads") for a in attention]),
        **of_attention("kv_heads", [_heads(a, "k_proj", "num_key_value_heads") for a in attention]),
        **of_attention("head_dim", [_rotated_width(a) for a in attention]),
        **of_attention("attention_scale", [float(f"{a.scaling:.6g}") for a in attention]),
        **of_attention("sliding_window", [_window(a) for a in attention]),
        **rope_attributes(rotary_embeddings(model)),
        **norm_attributes(norm_epsilons(model, hf_places(model, shape))),
        **per_layer(
            "activation",
            [plain_activation_name(getattr(m, "experts", m), dtype) for m in mlps.values()],
            list(mlps),
        ),
        **_routing([block for _, block in sparse_blocks(model)]),
        "tie_word_embeddings": model.lm_head.weight is table,
        **active_dropout(model),
    }


def _window(attention: Any) -> int | None:
    """The sliding window, an attribute of the attention or, in other families, of the config, where
    transformers writes 0 for none. Some attentions keep it in layers without one as well."""
    if not getattr(attention, "is_sliding", True):
        return None
    if hasattr(attention, "sliding_window"):
        return attention.sliding_window
    return getattr(attention.config, "sliding_window", None) or None


def _rotated_width(attention: Any) -> int:
    """The features of a head, or those of them that a latent attention rotates."""
    return getattr(attention, "qk_rope_head_dim", None) or attention.head_dim


def _heads(attention: Any, projection: str, key: str) -> int | None:
    """The number of heads of a projection or, where it is fused with others, that of the config."""
    if getattr(attention, projection, None) is None or hasattr(attention, "kv_lora_rank"):
        return getattr(attention.config, key)
    width = getattr(getattr(attention, projection), "out_features", None)
    # A product of queries may have their gates, too.
    gated = projection == "q_proj" and width == 2 * getattr(attention.o_proj, "in_features", 0)
    return None if width is None else width // attention.head_dim // (2 if gated else 1)


def _routing(blocks: list[Any]) -> dict[str, Any]:
    """How the sparse layers route; empty for a dense model."""
    # Mixtral's router has no such switch: it always divides by the sum; DeepSeek-V2's never does.
    routers = [router_of(block) for block in blocks]
    norm = [
        bool(getattr(router, "norm_topk_prob", not hasattr(router, "topk_method")))
        for router in routers
    ]
    corrected = [router for router in routers if hasattr(router, "e_score_correction_bias")]
    return {
        **corrected_routing(
            groups=[g.num_group for g in corrected],
            top_groups=[g.topk_group for g in corrected],
            scale=[g.routed_scaling_factor for g in corrected],
        ),
        **per_layer("experts_per_token", [router.top_k for router in routers]),
        **per_layer("norm_topk_prob", norm),
    }
