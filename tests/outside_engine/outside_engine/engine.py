"""The engine: where its operators lie, what its live model is, and one forward of it."""

import torch
from outside_engine.model import Decoder
from safetensors.torch import load_file

from rlk_align.engines.common import attributes
from rlk_align.engines.common.places import Place
from rlk_align.engines.common.rows import ForwardRows
from rlk_align.engines.common.user_patch import apply_patch
from rlk_align.engines.forward_engine import ForwardEngine
from rlk_align.model.checkpoint import read_config, tensor_name, weight_files
from rlk_align.model.rotary import rope_parameters
from rlk_align.model.sites import model_sites


class OutsideEngine(ForwardEngine):
    def open(self):
        s, self.config = self.shape, read_config(self.model_path)
        self.device = self.spec.device or ("cuda" if torch.cuda.is_available() else "cpu")
        rope = rope_parameters(self.config)
        inv_freq = rope["rope_theta"] ** (torch.arange(0, s.head_dim, 2) / -s.head_dim)
        self.model = Decoder(s, self.config["rms_norm_eps"], inv_freq.to(self.device))
        saved = {n: t for f in weight_files(self.model_path) for n, t in load_file(f).items()}
        for site in filter(lambda site: site.operator.weight, model_sites(s)):
            tied = self.config["tie_word_embeddings"] and site.operator.tied_to
            weight = saved[tensor_name(tied or site.parameter)]
            weight = weight.to(self.device, getattr(torch, self.spec.dtype(s.dtype)))
            self.model.get_submodule(site.name).weight = torch.nn.Parameter(weight)
        if self.kernels is not None:
            self.kernels.in_model(self.model, rope)
        apply_patch(self.spec, self.model)

    def places(self):
        for site in model_sites(self.shape)[:-1]:  # no module gives the last, the log-prob
            rows = "sampled" if site.sampled_rows_only else "all"
            yield Place(sites=(site.name,), module=site.name, rows=rows)

    def version(self):
        return torch.__version__

    def dtype(self):
        return str(self.model.embed.weight.dtype).removeprefix("torch.")

    def attributes(self):
        at, (vocabulary, hidden) = self.model.layers[0], self.model.embed.weight.shape
        (inv_freq,), size = at.q_rope.operands, len(at.q_norm.weight)
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

    def step(self, taps, rows, ids, cache):
        taps.at(rows, self.device)
        cache = cache or [[] for _ in self.model.layers]
        ids, at = (torch.tensor(x, device=self.device) for x in (ids, rows.position))
        return self.model(ids, at, cache, self.shape.head_dim), cache

    def forward(self, batch, members, taps):
        s, at = batch.samples[members[0]], batch.samples[members[0]].sampled_positions
        rows = ForwardRows.of_sequence(members[0], range(len(s.ids)), at)
        logits, _ = self.step(taps, rows, s.ids, None)
        target = torch.tensor(s.response_ids, device=self.device)
        return {members[0]: self.logprobs(logits[at.start : at.stop], target)}

    def stop_ids(self):
        return {self.config["eos_token_id"]}
