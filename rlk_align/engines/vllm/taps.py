"""Where the canonical sites lie in a vLLM decoder, and the hooks that observe them.

vLLM fuses q, k, v and gate, up; adds the residual inside the next norm, which returns
(normed, residual stream); and packs the tokens of all requests into one `[tokens, features]`.
"""

from typing import Any

import numpy as np
import torch

from rlk_align.engines.common.hooks import Hooks, first
from rlk_align.engines.common.rows import packed_rows
from rlk_align.engines.vllm.parallel import TensorParallel
from rlk_align.model.families import ModelShape
from rlk_align.trace.writer import PassWriter


class VLLMTaps(Hooks):
    """Hooks on vLLM's live model, and where each packed row belongs."""

    def __init__(
        self,
        runner: Any,
        parallel: TensorParallel,
        shape: ModelShape,
        tap: PassWriter | None,
        samples: dict[str, int],
        sampled: list[range],
        kind: str,
    ) -> None:
        """`tap`: what rank 0 writes to; None on the others, which take part in gathering."""
        super().__init__()
        self._runner, self._tap, self._samples = runner, tap, samples
        self._parallel = parallel
        self._sampled, self._kind = sampled, kind
        # Of this rank; with more ranks than k and v heads, several hold the same one.
        world = parallel.world
        self._copies = max(1, world // shape.kv_heads)
        self._q = shape.heads * shape.head_dim // world
        self._kv = shape.kv_heads * shape.head_dim * self._copies // world
        self._intermediate = shape.intermediate // world
        self._layer = 0
        self._batch: Any = None

    def install(self) -> None:
        model = self._runner.get_model()
        self._watch_batches()
        self.before(model, self._place_rows, with_kwargs=True)
        self.on_output(model, self._keep_hidden)
        self.after(model.logits_processor, self._see_logits)
        self.on_output(model.model.embed_tokens, lambda out: self._see("embed", out))
        layers = list(model.model.layers)
        for i, layer in enumerate(layers):
            self._hook_layer(i, layer)
        last = f"layers.{len(layers) - 1}.mlp_residual"
        self._norm(model.model.norm, "final_norm", last)

    def _hook_layer(self, i: int, layer: Any) -> None:
        name, attention, mlp = f"layers.{i}", layer.self_attn, layer.mlp

        def enter_attention(*_: Any) -> None:
            self._layer = i

        def rope(out: Any) -> None:
            # One module serves all layers, so the hook of each layer asks whose turn it is.
            if self._layer == i:
                self._see_shards((f"{name}.q_rope", f"{name}.k_rope"), out)

        def qkv(out: Any) -> None:
            sites = (f"{name}.q_proj", f"{name}.k_proj", f"{name}.v_proj")
            self._see_shards(sites, first(out).split([self._q, self._kv, self._kv], dim=-1))

        def gate_up(out: Any) -> None:
            sites = (f"{name}.gate_proj", f"{name}.up_proj")
            self._see_shards(sites, first(out).split(self._intermediate, dim=-1))

        self._norm(
            layer.input_layernorm, f"{name}.attn_norm", f"layers.{i - 1}.mlp_residual" if i else ""
        )
        self.before(attention, enter_attention)
        self.on_output(attention.qkv_proj, qkv)
        for op in ("q_norm", "k_norm"):
            if hasattr(attention, op):
                self._shard(getattr(attention, op), f"{name}.{op}")
        self.on_output(attention.rotary_emb, rope)
        self._shard(attention.attn, f"{name}.attn")
        self._site(attention.o_proj, f"{name}.o_proj")
        self._norm(layer.post_attention_layernorm, f"{name}.mlp_norm", f"{name}.attn_residual")
        self.on_output(mlp.gate_up_proj, gate_up)
        self._shard(mlp.act_fn, f"{name}.act")
        self._site(mlp.down_proj, f"{name}.down_proj")

    def _site(self, module: Any, site: str) -> None:
        self.on_output(module, lambda out: self._see(site, first(out)))

    def _shard(self, module: Any, site: str) -> None:
        """A module of which each rank computes its own heads or features."""
        self.on_output(module, lambda out: self._see_shards((site,), (first(out),)))

    def _norm(self, module: Any, site: str, residual: str) -> None:
        """A norm, and the residual stream that it returns where it adds one."""

        def see(out: Any) -> None:
            if residual:
                self._see(residual, out[1])
            self._see(site, first(out))

        self.on_output(module, see)

    def _watch_batches(self) -> None:
        """vLLM's newer runner returns the batch's layout from prepare_inputs; the older one
        keeps it in itself."""
        if not hasattr(self._runner, "prepare_inputs"):
            return
        original = self._runner.prepare_inputs

        def prepare_inputs(*args: Any, **kwargs: Any) -> Any:
            self._batch = original(*args, **kwargs)
            return self._batch

        self.replace(self._runner, "prepare_inputs", prepare_inputs)

    def _place_rows(self, _module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Which (sample, position) each packed row of the coming forward is."""
        runner = self._runner
        if self._batch is not None:
            count, starts = self._batch.num_reqs, self._batch.query_start_loc_np
            requests = self._batch.req_ids
        else:
            count, starts = runner.input_batch.num_reqs, runner.query_start_loc.np
            requests = runner.input_batch.req_ids
        starts = np.asarray(starts[: count + 1])
        owners = np.array([self._samples[str(r).split("-")[0]] for r in requests[:count]])
        self._last = starts[1:] - 1
        positions = kwargs["positions"] if "positions" in kwargs else args[1]
        position = positions[: starts[-1]].cpu().numpy().astype(np.int64)
        self._rows = packed_rows(owners, starts, position, self._sampled)

    def _keep_hidden(self, out: torch.Tensor) -> None:
        self._hidden = out

    def _see(self, site: str, value: torch.Tensor) -> None:
        # Rows past the batch are padding.
        rows = value.reshape(value.shape[0], -1)[: self._rows.cells]
        if self._tap is not None:
            self._tap(site, rows, self._rows.sample, self._rows.position)

    def _see_shards(self, sites: tuple[str, ...], parts: Any) -> None:
        """Sites of which every rank holds consecutive heads or features."""
        for site, part in zip(sites, parts, strict=True):
            copies = self._copies if site.rpartition(".")[2][:2] in ("k_", "v_") else 1
            part = part.reshape(part.shape[0], -1)
            self._see(site, self._parallel.gather(part, 1, copies))

    def _see_logits(self, _module: Any, inputs: Any, logits: torch.Tensor) -> None:
        """Logits are computed for each request's last row in order to sample, and for slices
        of the prompt in order to score it. A pass wants the one or the other."""
        if self._tap is None:
            return
        hidden = inputs[1]
        is_slice = hidden.untyped_storage().data_ptr() == self._hidden.untyped_storage().data_ptr()
        if is_slice != (self._kind == "prefill"):
            return
        if is_slice:
            first = hidden.storage_offset() // self._hidden.stride(0)
            rows = np.arange(first, first + hidden.shape[0])
            rows = rows[rows < self._rows.cells]
        else:
            rows = self._last
        kept = np.flatnonzero(self._rows.sampled[rows])
        index = torch.from_numpy(kept).to(logits.device)
        chosen = rows[kept]
        sample, position = self._rows.sample[chosen], self._rows.position[chosen]
        self._tap("logits", logits[index], sample, position)
