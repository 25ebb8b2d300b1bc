"""The properties in which decoder families differ."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rlk_align.errors import ModelError
from rlk_align.model.layers import DENSE, LayerOperators
from rlk_align.model.operators import OPERATORS
from rlk_align.model.sparse_config import CLAMP_KEYS, EXPERT_KEYS, ExpertSettings
from rlk_align.model.stored import Stacks

HYBRID_KEYS = frozenset(
    {
        *("layer_types", "layer_types.linear_attention", "full_attention_interval"),
        *("linear_num_key_heads", "linear_num_value_heads", "linear_conv_kernel_dim"),
        *("linear_key_head_dim", "linear_value_head_dim"),
    }
)
"""The keys of a family with gated delta nets."""
STATE_SPACE_KEYS = frozenset(
    f"layer_types.{kind}" for kind in ("linear_attention", "mamba", "attention")
) | {"layer_types"}
"""The keys of a family with state-space models, beside those of their sizes."""
LATENT_KEYS = frozenset(
    {
        *("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"),
        # The last is the sum of two others.
        *("rope_interleave", "qk_head_dim"),
    }
)
"""The keys of a family with latent attention."""


WIDE_HEAD_KEYS = frozenset(
    {
        *("global_head_dim", "num_global_key_value_heads", "attention_k_eq_v"),
        "per_layer_config",
    }
)
"""The keys of a family whose layers have heads of two sizes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """The properties of one decoder family."""

    layer: LayerOperators = DENSE
    before: tuple[str, ...] = ("embed",)
    after: tuple[str, ...] = ("final_norm", "logits", "logprob")
    """The operators before and after the layers."""
    biases: Mapping[str, bool | str] = field(default_factory=dict)
    """Operator -> whether it has a bias, or the config's key for it, if that is not the
    catalogue's."""
    window: Mapping[str, int | bool | None] = field(default_factory=dict)
    """Defaults of the config's keys for a sliding window; empty for a family without windows."""
    period: int = 0
    """In a config without `layer_types`, every layer whose number is a multiple of this, counted
    from 1, sees all keys, and the others have the window; 0 if all layers are of one kind."""
    period_keys: tuple[str, ...] = ()
    """The config's keys for another period; the first that it has counts."""
    local_theta: tuple[str, float] = ("rope_theta", 10000.0)
    """With `rope_by_kind`, the config's key for the theta of layers with a window, in the older
    form, and its default."""
    theta: float = 10000.0
    """The theta of a config that states none."""
    activation: tuple[str, str] = ("hidden_act", "silu")
    """The config's key for the activation, empty if none changes it, and its default."""
    norm_eps: str = "rms_norm_eps"
    """The config's key for the epsilon of norms."""
    one_plus_weight: bool = False
    """Whether norms multiply by 1 + weight."""
    embedding_scale: str = ""
    """What multiplies the embedding: `sqrt_hidden`, the root of the hidden size, rounded to the
    model's dtype; empty for nothing."""
    score_cap: str = ""
    """The config's key for the cap c of attention's scores s: c tanh(s / c); empty for none."""
    logit_cap: str = ""
    """The config's key for the same cap of the logits; empty for none."""
    heads_first: bool = False
    """Whether transformers norms q and k as `[B, heads, T, head_dim]`."""
    one_activation: bool = False
    """Whether all layers of vLLM's model share one module for the activation."""
    interleaved: bool = False
    """Whether features 2j and 2j + 1 of a head turn together, and not j and j + half the width."""
    rope_by_kind: bool = False
    """Whether layers with a window have a rotary embedding of their own: `rope_parameters` has one
    for each kind of layer, or `rope_scaling` is for the layers that see all keys only."""
    experts: ExpertSettings | None = None
    """How its config describes experts; None for a family without experts."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of other settings that the config may leave out."""
    qk_norm: str = ""
    """The config's key for norms of q and k; empty if the family decides this itself."""
    predictors: str = ""
    """The config's key for the number of layers after the decoder's, which predict further tokens;
    empty if the family has none."""
    modules: Mapping[str, str] = field(default_factory=dict)
    """Operator -> the module of its parameters, where it is not the catalogue's."""
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Module of a layer in the checkpoint -> the operators whose weights are its rows, in order;
    those that no layer of a model has are left out."""
    by_key_head: bool = False
    """Whether these rows belong to the first head of keys, with its heads of values, then to the
    second, and so on."""
    stacks: Stacks = field(default_factory=Stacks)
    """The tensors of a checkpoint that have all experts of a layer."""
    reads: Mapping[str, str] = field(default_factory=dict)
    """Value -> the value that a layer's operators read in its place."""
    unrotated: Callable[[Mapping[str, Any]], tuple[int, ...]] | None = None
    """config.json -> the layers without a rotation; None if every layer rotates q and k."""
    settings: tuple[str, ...] = ()
    """Further keys of config.json that this description covers."""
    values: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Keys of config.json of which both engines have one form -> the values that state it."""
    uncovered: Mapping[str, Any] = field(default_factory=dict)
    """Keys that it does not cover -> the value that transformers takes where config.json leaves
    them out, if that is not neutral."""
    attention_scale: tuple[str, float] = ("", 0.0)
    """The config's key for the number that scales attention's scores, and the power of it; empty if
    1 / √(size of a head) scales them."""
    wide_heads: bool = False
    """Whether layers that see all keys have heads of another size, and of another number for keys:
    those of `global_head_dim` and `num_global_key_value_heads`."""
    temperature: bool = False
    """Whether the scale depends on the query's position, by `llama_4_scaling_beta` of its rope."""
    backend: bool = False
    """Whether vLLM runs the code of transformers for it, because it has no class of its own."""
    adds_outside_norms: bool = False
    """Whether vLLM's class for it adds residuals as transformers does, and not inside norms."""
    vllm_on_one_rank: str = ""
    """Why vLLM computes it on one rank only; empty if several share it."""
    vllm_constants: Mapping[str, Any] = field(default_factory=dict)
    """Settings, `rope_type` among them, of which vLLM's class has one value only."""
    vllm_needs: tuple[str, ...] = ()
    """Settings without which vLLM's class cannot be made, although transformers' has defaults."""
    hybrid: bool = False
    """Whether some layers have a gated delta net in place of attention: those of which
    `layer_types`, or `period`, says `linear_attention`."""
    state_space: Mapping[str, str] = field(default_factory=dict)
    """Size of the state-space models (Mamba-2) that these layers have instead, a field of
    `ModelShape` -> the config's key for it; empty for a family without such layers."""
    beside_attention: bool = False
    """Whether every layer has a state-space model beside its attention."""
    scales: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Operator -> for each of its inputs, the config's key for the number that multiplies it
    before, or `KEY.N` for a number of a list; `KEY.N-M` has one for each of x, B and C."""
    normed_by_group: bool = False
    """Whether their norm is over the features of each group of B and C, and not over all."""
    inner: str = "intermediate_size"
    """The config's key for the inner size of a dense MLP."""
    latent: bool = False
    """Whether attention reads keys and values from a latent (MLA)."""
    ignored: str = ""
    """The start of the names of tensors that no engine reads here; empty if there are none."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Engine, or `kernels` -> why it does not compute the family."""

    needs_kernels: Mapping[str, str] = field(default_factory=dict)
    """Engine -> why it computes the family with `kernels=rlk` only."""

    @property
    def sigmoid(self) -> bool:
        """Whether its routers score experts by a sigmoid."""
        return self.experts is not None and self.experts.sigmoid

    @property
    def corrected(self) -> bool:
        """Whether its routers correct the scores for the choice of experts."""
        return self.experts is not None and (self.experts.sigmoid or self.experts.corrected)

    def check(self, engine: str, kind: str, kernels: bool = False) -> None:
        """Raises ModelError if the engine, with the kernels or without, or the kernels do not
        compute this family, whose `model_type` is `kind`."""
        if engine in self.needs_kernels and not kernels:
            raise ModelError(
                f"{engine} does not support model_type {kind!r} without the kernels: "
                f"{self.needs_kernels[engine]}",
                "add kernels=rlk",
            )
        if engine in self.refused:
            raise ModelError(
                f"{engine} does not support model_type {kind!r}: {self.refused[engine]}",
                {
                    "kernels": "compare with kernels=off",
                    "vllm": "compare with --rollout hf",
                    "sglang": "compare with --rollout vllm or --rollout hf",
                }.get(engine, "compare with --train hf"),
            )

    def parent(self, operator: str) -> str:
        """The module of a layer that contains the module of an operator."""
        return self.modules.get(operator, OPERATORS[operator].module).rpartition(".")[0]

    def multiplies(self, site: str) -> bool:
        """Whether a number of the config multiplies the output of this site outside the layers."""
        ends = (OPERATORS[name] for name in (*self.before, *self.after))
        return any(op.site == site and op.multiplier for op in ends)

    @property
    def keys(self) -> frozenset[str]:
        """The keys of config.json that this description covers, beside those of every family."""
        kinds = {"layer_types", "layer_types.sliding_attention"}
        windows = {*self.window, *kinds} if self.window else set()
        windows |= set(HYBRID_KEYS) if self.hybrid else set()
        windows |= {*STATE_SPACE_KEYS, *self.state_space.values()} if self.state_space else set()
        windows |= set(LATENT_KEYS) if self.latent else set()
        windows |= {"rope_parameters.KIND"} if self.rope_by_kind else set()
        windows |= set(WIDE_HEAD_KEYS) if self.wide_heads else set()
        experts: set[str] = set()
        if self.experts:
            experts = {*EXPERT_KEYS, self.experts.intermediate, *self.experts.names.values()}
            experts |= {self.experts.layer_kinds}
            experts |= set(CLAMP_KEYS) if self.experts.clamped else set()
        named = {*self.defaults, *self.settings, self.qk_norm, self.predictors}
        named |= {key.partition(".")[0] for keys in self.scales.values() for key in keys}
        named |= {self.attention_scale[0], self.activation[0], *self.period_keys}
        named |= {self.score_cap, self.logit_cap, self.norm_eps, self.inner}
        named |= {key for key in self.biases.values() if isinstance(key, str)}
        named |= {self.local_theta[0]} if self.rope_by_kind else set()
        named |= {"rope_parameters.llama_4_scaling_beta"} if self.temperature else set()
        return frozenset({*windows, *experts, *named} - {""})
