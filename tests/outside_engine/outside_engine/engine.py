"""The engine: where its operators lie, what its live model is, and one forward of it."""

import torch
from outside_engine.model import Decoder
from safetensors.torch import load_file

from rlk_align.engines.common import attributes
from rlk_align.engines.common.edits import Editor
from rlk_align.engines.common.parameters import LiveParameter, record_parameter
from rlk_align.engines.common.places import Place
from rlk_align.engines.common.rows import ForwardRows
from rlk_align.engines.common.site_hooks import LiveRows, SiteHooks
from rlk_align.engines.common.user_patch import apply_patch
from rlk_align.engines.decoding import DecodingEngine
from rlk_align.model.checkpoint import read_config, tensor_name, weight_files
from rlk_align.model.rotary import rope_parameters
from rlk_align.model.sites import model_sites


def places(shape):
    for site in model_sites(shape)[:-1]:  # no module gives the last, the log-prob
        rows = "sampled" if site.sampled_rows_only else "all"
        yield Place(sites=(site.name,), module=site.name, rows=rows)


class Tapped(SiteHooks):
    def live_rows(self, place, value):
        at = self.rows.sampled if place.rows == "sampled" else slice(None)
        return LiveRows(None, self.rows.sample[at], self.rows.position[at], len(value))


class OutsideEngine(DecodingEngine):
    intervenes = True

    def open(self):
        s, self.config = self.shape, read_config(self.model_path)
        self.device = self.spec.device or ("cuda" if torch.cuda.is_available() else "cpu")
        rope = rope_parameters(self.config)
        inv_freq = rope["rope_theta"] ** (torch.arange(0, s.head_dim, 2) / -s.head_dim)
        inv_freq = inv_freq.to(self.device)
        self.model = Decoder(s, self.config["rms_norm_eps"], inv_freq)
        saved = {n: t for f in weight_files(self.model_path) for n, t in load_file(f).items()}
        for site in filter(lambda s: s.operator.weight, model_sites(s)):
            tied = self.config["tie_word_embeddings"] and site.operator.tied_to
            weight = saved[tensor_name(tied or site.parameter)]
            weight = weight.to(self.device, getattr(torch, self.spec.dtype(s.dtype)))
            self.model.get_submodule(site.name).weight = torch.nn.Parameter(weight)
        if self.kernels is not None:
            self.kernels.in_model(self.model, rope)
        apply_patch(self.spec, self.model)

    def version(self):
        return torch.__version__

    def dtype(self):
        return str(self.model.embed.weight.dtype).removeprefix("torch.")

    def weights(self):
        for site in filter(lambda s: s.operator.weight, model_sites(self.shape)):
            weight = self.model.get_submodule(site.name).weight.detach()
            yield record_parameter(LiveParameter(site.parameter, weight))

    def attributes(self):
        at, size = self.model.layers[0], len(self.model.layers[0].q_norm.weight)
        (inv_freq,) = at.q_rope.operands
        vocabulary, hidden = self.model.embed.weight.shape
        return {
            **{"layers": len(self.model.layers), "hidden_size": hidden, "vocab_size": vocabulary},
            **{"heads": len(at.q_proj.weight) // size, "kv_heads": len(at.k_proj.weight) // size},
            **{"head_dim": size, "rope_dim": size, "attention_scale": float(f"{size**-0.5:.6g}")},
            **{"rope_type": "default", "rope_theta": attributes.rope_theta(inv_freq)},
            **{"norm_eps": at.attn_norm.operands[0], "activation": "silu"},
            **{"final_norm_eps": self.model.final_norm.operands[0]},
            **{"tie_word_embeddings": self.config["tie_word_embeddings"]},
            **attributes.processing(self.temperature),
        }

    def tapped(self, tap, editor):
        return Tapped(self.model, places(self.shape), tap, editor)

    def logits(self, taps, rows, ids, caches):
        taps.rows = rows
        ids, at = (torch.tensor(x, device=self.device) for x in (ids, rows.position))
        return self.model.logits(self.model(ids, at, caches, self.shape.head_dim)[rows.sampled])

    def next_logits(self, taps, rows, ids, cache):
        cache = cache or [[] for _ in self.model.layers]
        return self.logits(taps, rows, ids, cache), cache

    def stop_ids(self):
        return {self.config["eos_token_id"]}

    @torch.inference_mode()
    def score(self, batch, tap, done, intervention=None):
        scored = {}
        with self.tapped(tap, Editor.of(intervention, batch)) as taps:
            for i, s in enumerate(batch.samples):
                rows = ForwardRows.of_sequence(i, range(len(s.ids)), s.sampled_positions)
                logits, _ = self.next_logits(taps, rows, s.ids, None)
                scored[i] = self.logprobs(logits, torch.tensor(s.response_ids, device=self.device))
                done(i + 1)
        return scored
