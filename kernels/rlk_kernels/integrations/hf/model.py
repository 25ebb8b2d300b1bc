"""The modules of a causal LM that are replaced, and the classes that replace them."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import Any

from torch import nn

from rlk_kernels.integrations import rotary
from rlk_kernels.integrations.errors import NotSupported
from rlk_kernels.integrations.families import (
    ARCHITECTURES,
    DEEPSEEK_V2,
    DELTA_NETS,
    GELU,
    LATENTS,
    LAYER_NORMS,
    ONE_PLUS,
    TEMPERED,
    UNGATED,
)
from rlk_kernels.integrations.finish import FINISHED, finish_of
from rlk_kernels.integrations.handle import Handle
from rlk_kernels.integrations.hf import attention, delta_net, latent, modules
from rlk_kernels.integrations.hf.adapter import HFLora, active_adapter, is_adapter, replace_factors
from rlk_kernels.integrations.hf.loss import causal_lm_loss
from rlk_kernels.integrations.hf.stock_modules import check_forwards, check_plain
from rlk_kernels.integrations.operators import (
    BY_DELTA_NET,
    LORA,
    Watch,
    become,
    check_delta_net,
    check_latent,
    check_sparse,
    excluded_operators,
    excludes,
    head_norms,
    mlp_linears,
    mlp_of,
    norms,
    rotates,
    shared_experts,
)
from rlk_kernels.integrations.process_changes import change_process, round_as_eager
from rlk_kernels.integrations.transformers_modules import HFLayerNorm, mlp_class
from rlk_kernels.integrations.transformers_rotary import Rotary, install

REVERSED = ("granitemoe",)
"""Families whose routers return a token's experts first, and the logits last."""
NOISE = (
    *("attention_dropout", "resid_pdrop", "residual_dropout", "embedding_dropout"),
    "router_jitter_noise",
)
"""The settings of config.json that add noise while a model trains."""
SUPPORTED = f"transformers' causal LMs of model_type {', '.join(ARCHITECTURES)} are"


def operators(model: Any) -> dict[str, Any]:
    """Canonical operator -> the module that computes it. Raises NotSupported for an unknown
    model."""
    _check_causal(model)
    inner = model.model
    named = {"embed": inner.embed_tokens}
    for i, layer in enumerate(inner.layers):
        try:
            here = _of_layer(layer, inner.rotary_emb)
        except AttributeError as error:
            raise NotSupported(f"layers.{i} is not transformers' own: {error}") from error
        named |= {f"layers.{i}.{op}": module for op, module in here.items() if module is not None}
    wrapped = {name: module for name, module in named.items() if is_adapter(module)}
    named |= {name: module.base_layer for name, module in wrapped.items()}
    named |= {f"{name}.{LORA}": module for name, module in wrapped.items()}
    return named | {"final_norm": inner.norm, "logits": model.lm_head}


def _of_layer(layer: Any, embedding: Any) -> dict[str, Any]:
    """Operator -> module; None for an operator that the layer lacks. embedding: the rotary one."""
    mlp = mlp_of(layer)
    if is_sparse(layer):
        router = getattr(mlp, "gate", None) or mlp.router
        routes = dict.fromkeys(("router", "experts", "routing_weights"), router)
        inside = routes | dict.fromkeys(_BY_EXPERTS, mlp.experts)
        if (shared := shared_experts(mlp)) is not None:
            inside |= {f"shared_{op}": module for op, module in _of_mlp(shared).items()}
            inside |= {"shared_gate": getattr(mlp, "shared_expert_gate", None)}
    else:
        inside = _of_mlp(mlp)
    net = getattr(layer, "linear_attn", None)
    branch = _of_attention(layer.self_attn, embedding) if net is None else _of_delta_net(net)
    return {**norms(layer), **branch, **inside}


def _of_attention(attn: Any, embedding: Any) -> dict[str, Any]:
    if attn.config.model_type in LATENTS:
        return _of_latent_attention(attn, embedding)
    q, k, v = _parts(attn, "qkv_proj", "q_proj", "k_proj", "v_proj")
    gated = attn.config.model_type in DELTA_NETS
    return {
        **{"q_proj": q, "k_proj": k, "v_proj": v},
        **head_norms(attn),
        **dict.fromkeys(("q_rope", "k_rope"), embedding if rotates(attn) else None),
        **{"attn": attn, "attn_gate": attn if gated else None, "o_proj": attn.o_proj},
    }


def _of_latent_attention(attn: Any, embedding: Any) -> dict[str, Any]:
    return {
        **{"q_proj": attn.q_proj, "q_a": attn.q_a_proj, "q_a_norm": attn.q_a_layernorm},
        **{"q_b": attn.q_b_proj, "kv_a": attn.kv_a_proj_with_mqa},
        "kv_a_norm": attn.kv_a_layernorm,
        **dict.fromkeys(("q_rope", "k_rope"), embedding),
        **{"latent_attn": attn, "o_proj": attn.o_proj},
    }


def _of_delta_net(net: Any) -> dict[str, Any]:
    mixed, z = _parts(net, "in_proj_qkvz", "in_proj_qkv", "in_proj_z")
    b, a = _parts(net, "in_proj_ba", "in_proj_b", "in_proj_a")
    products = {"qkv_in": mixed, "z": z, "b": b, "a": a}
    inside = dict.fromkeys(BY_DELTA_NET, net)
    return products | inside | {"gated_norm": net.norm, "out_proj": net.out_proj}


def _of_mlp(mlp: Any) -> dict[str, Any]:
    return mlp_linears(mlp) | {"act": mlp}


def _parts(holder: Any, fused: str, *ops: str) -> list[Any]:
    """The module of each operator: one module for all of them in a family that fuses them."""
    whole = getattr(holder, fused, None)
    return [getattr(holder, op) if whole is None else whole for op in ops]


_BY_EXPERTS = ("moe_out", "gate_proj", "up_proj", "act", "down_proj")


_PRODUCTS = ("qkv_in", "z", "b", "a", "q_a", "q_b", "kv_a")
"""The products whose names do not end with `proj`."""


def is_sparse(layer: Any) -> bool:
    """Whether a layer sends each token to a few experts."""
    return hasattr(mlp_of(layer), "experts")


def _classes(model: Any, excluded: frozenset[str]) -> Iterator[tuple[str, Any, type]]:
    """Yields (operator's name, module, new class) for each module to replace, once."""
    # All layers share one rotary embedding, and a fused product computes several operators.
    named = operators(model)
    first = {id(module): name for name, module in reversed(named.items())}
    for name, module in named.items():
        if first[id(module)] != name:
            continue
        op = name.rpartition(".")[2]
        if op == "embed":
            kind: type = modules.HFEmbedding
        elif op == LORA:
            active_adapter(module)  # refuses one
            kind = HFLora
        elif op in ("router", "moe_out"):
            reverse = model.config.model_type in REVERSED
            router = modules.ReversedRouter if reverse else modules.HFRouter
            kind = router if op == "router" else modules.experts_class(module)
        elif op == "conv":
            kind = delta_net.DeltaNetModule
        elif op == "gated_norm":
            kind = delta_net.GatedNorm
        elif op.endswith("norm"):
            kind = _norm_class(model.config.model_type)
        elif op.endswith("proj") or op in _PRODUCTS:
            kind = modules.HFLinear
        elif op == "q_rope":
            kind = Rotary
        else:
            kind = {
                **{"attn": _attention_class(model.config.model_type), "logits": modules.Head},
                "latent_attn": latent.LatentAttention,
                "shared_gate": modules.SharedGate,
                **dict.fromkeys(("act", "shared_act"), mlp_class(module)),
            }[op]
        fused = ("q_rope", "k_rope") if op == "q_rope" else (op,)
        if not excludes(excluded, *fused) and not isinstance(module, kind):
            check_plain(name, module)
            yield name, module, kind


def _norm_class(family: str) -> type:
    if family in LAYER_NORMS:
        return HFLayerNorm
    return modules.OnePlusNorm if family in ONE_PLUS else modules.HFNorm


def _attention_class(family: str) -> type:
    if family in DELTA_NETS:
        return delta_net.GatedAttention
    return attention.TemperedAttention if family in TEMPERED else attention.AttentionModule


def _check_products(model: Any, excluded: frozenset[str]) -> None:
    """Raises NotSupported if one product computes an excluded operator and one that is not."""
    computed: dict[int, set[str]] = {}
    for name, module in operators(model).items():
        if isinstance(module, nn.Linear):
            computed.setdefault(id(module), set()).add(name.rpartition(".")[2])
    for ops in computed.values():
        if (some := ops & excluded) and some != ops:
            raise NotSupported(
                f"{', '.join(sorted(some))} cannot be excluded alone in {model.config.model_type}, "
                f"which computes {', '.join(sorted(ops))} by one product; exclude all, or none"
            )


def _check_causal(model: Any) -> None:
    if not hasattr(getattr(model, "model", None), "embed_tokens") or not hasattr(model, "lm_head"):
        # PEFT's model around one.
        inner = "; pass its get_base_model()" if hasattr(model, "get_base_model") else ""
        raise NotSupported(f"a {type(model).__name__} is not supported; {SUPPORTED}{inner}")


def _check(model: Any) -> None:
    _check_causal(model)
    config = model.config
    if config.model_type not in ARCHITECTURES:
        raise NotSupported(
            f"a {type(model).__name__} ({config.model_type}) is not supported; {SUPPORTED}"
        )
    usual = UNGATED.get(config.model_type, "silu")
    if config.model_type not in GELU and config.hidden_act != usual:
        raise NotSupported(f"hidden_act={config.hidden_act} is not supported; {usual} is")
    for name in NOISE:
        if getattr(config, name, 0.0) and model.training:
            raise NotSupported(f"{name} is not supported; set it to 0")
    if config.model_type == "deepseek_v2":
        for setting, usual in DEEPSEEK_V2.items():
            if (value := getattr(config, setting)) not in (None, usual):
                raise NotSupported(f"{setting}={value} of DeepSeek-V2 is not supported; {usual} is")
    for rope in rotary.by_kind(config.rope_parameters):
        rotary.check_whole(config.model_type, rope)
    if not getattr(config, "is_causal", True):
        raise NotSupported("is_causal=False is not supported: the kernels' attention is causal")
    for name, parameter in model.named_parameters():
        if type(parameter).__name__ == "DTensor":
            raise NotSupported(f"{name} is already sharded; call use_kernels before fully_shard")
        if type(parameter) is not nn.Parameter:
            # A quantised parameter, for example, may be in a linear of torch's.
            kind = f"{type(parameter).__module__}.{type(parameter).__qualname__}"
            raise NotSupported(f"{name} is a {kind}; only a plain torch.nn.Parameter is supported")


def replace(model: Any, excluded: Iterable[str]) -> Handle:
    """See `use_kernels`."""
    excluded = excluded_operators(excluded)
    _check(model)
    gated = []
    if any(map(is_sparse, model.model.layers)):
        check_sparse(excluded)
        blocks = [mlp_of(layer) for layer in model.model.layers]
        gated = [block for block in blocks if hasattr(block, "shared_expert_gate")]
    nets = [layer for layer in model.model.layers if hasattr(layer, "linear_attn")]
    if model.config.model_type in DELTA_NETS:
        check_delta_net(excluded)
    if model.config.model_type in LATENTS:
        check_latent(excluded)
    _check_products(model, excluded)
    if (nets or any(map(is_sparse, model.model.layers))) and any(map(is_adapter, model.modules())):
        raise NotSupported(
            "adapters of a model with sparse layers or gated delta nets are not supported: merge "
            "them"
        )
    if not excludes(excluded, "q_rope", "k_rope"):
        for rope in rotary.by_kind(model.config.rope_parameters):
            rotary.check(rope)
    classes = list(_classes(model, excluded))
    check_forwards(model, {name: module for name, module, _ in classes})
    undo = ExitStack()
    undo.callback(change_process("rounding", round_as_eager))
    for _, module, kind in classes:
        if kind is Rotary:
            undo.push(install(module, model.config))
        else:
            become(module, kind, undo)
    for layer in filter(is_adapter, operators(model).values()):
        replace_factors(layer, undo)
    for layer in nets:
        become(layer, delta_net.DeltaNetLayer, undo)
    if model.config.model_type in LATENTS:
        _set_epsilon(model, excluded, undo)
    for block in gated:
        become(block, modules.GatedBlock, undo)
    finish = finish_of(model.config)
    if "logits" not in excluded and finish != FINISHED:
        undo.callback(vars(model.lm_head).pop, "rlk_finish", None)
        model.lm_head.rlk_finish = finish
        become(model, modules.FinishedLM, undo)
    if excluded.isdisjoint(("logits", "logprob")):
        if "_loss_function" in vars(model):
            undo.callback(setattr, model, "loss_function", model.loss_function)
        else:  # the config decides the loss
            undo.callback(vars(model).pop, "_loss_function")
        model.loss_function = causal_lm_loss
    if excluded.isdisjoint(("attn", "latent_attn")):
        attention.register()
        undo.callback(
            setattr, model.config, "_attn_implementation", model.config._attn_implementation
        )
        model.config._attn_implementation = attention.NAME
    # A hook of the decoder, because adapters call the model's forward without its hooks.
    undo.callback(model.model.register_forward_pre_hook(Watch(model, operators)).remove)
    return Handle(model, undo)


def _set_epsilon(model: Any, excluded: frozenset[str], undo: ExitStack) -> None:
    """Gives norms of latents the epsilon of config.json, until `undo` is closed, as other engines
    do: transformers' have 1e-6, whatever config.json says."""
    for name, norm in operators(model).items():
        op = name.rpartition(".")[2]
        if op in ("q_a_norm", "kv_a_norm") and op not in excluded:
            undo.callback(setattr, norm, "variance_epsilon", norm.variance_epsilon)
            norm.variance_epsilon = model.config.rms_norm_eps
