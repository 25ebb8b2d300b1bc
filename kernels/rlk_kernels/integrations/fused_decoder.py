"""Where rollout engines keep the operators of a decoder: one product for q, k and v, one for gate
and up, and one rotary module for both rotations. vLLM and SGLang give the modules the same names.
"""

from typing import Any

from rlk_kernels.integrations.operators import (
    BY_DELTA_NET,
    ROUTED,
    Counted,
    head_norms,
    mlp_linears,
    mlp_of,
    norms,
    rotates,
    shared_experts,
)


def modules(model: Any) -> dict[str, Any]:
    """Canonical operator -> the module that computes it in a live causal LM, for all operators
    except the log-prob. In a sparse layer, `experts` stands for all operators but the router."""
    inner = model.model
    # vLLM's GPT-OSS has names of its own.
    named = {"embed": getattr(inner, "embed_tokens", None) or inner.embedding}
    for i, layer in enumerate(inner.layers):
        net = getattr(layer, "linear_attn", None)
        attn = getattr(layer, "self_attn", None) or getattr(layer, "attn", None)
        if net is not None:
            branch = _of_delta_net(net)
        elif (latent := getattr(attn, "mla_attn", None)) is not None:
            branch = _of_latent_attention(latent)
        else:
            branch = _of_attention(attn, inner)
        here = {**norms(layer), **branch, **_of_mlp(mlp_of(layer))}
        named |= {f"layers.{i}.{op}": module for op, module in here.items() if module is not None}
    return named | {"final_norm": inner.norm, "logits": model.logits_processor}


def _of_attention(attn: Any, inner: Any) -> dict[str, Any]:
    # The code of transformers has one rotary embedding for all layers.
    rotary = getattr(attn, "rotary_emb", None) or getattr(inner, "rotary_emb", None)
    return {
        **{"q_proj": attn.qkv_proj, "k_proj": attn.qkv_proj, "v_proj": attn.qkv_proj},
        **head_norms(attn),
        **dict.fromkeys(("q_rope", "k_rope"), rotary if rotates(attn) else None),
        **{"attn": attn.attn, "o_proj": attn.o_proj},
        "attn_gate": attn if getattr(attn, "attn_output_gate", False) else None,
    }


def _of_latent_attention(wrapper: Any) -> dict[str, Any]:
    if wrapper.q_lora_rank is None:
        queries = {"q_proj": wrapper.q_proj, "kv_a": wrapper.kv_a_proj_with_mqa}
    else:
        queries = {
            **dict.fromkeys(("q_a", "kv_a"), wrapper.fused_qkv_a_proj),
            **{"q_a_norm": wrapper.q_a_layernorm, "q_b": wrapper.q_b_proj},
        }
    return {
        **queries,
        "kv_a_norm": wrapper.kv_a_layernorm,
        **dict.fromkeys(("q_rope", "k_rope"), wrapper.rotary_emb),
        **{"latent_attn": wrapper.mla_attn, "o_proj": wrapper.o_proj},
    }


def _of_delta_net(net: Any) -> dict[str, Any]:
    return {
        **dict.fromkeys(("qkv_in", "z"), net.in_proj_qkvz),
        **dict.fromkeys(("b", "a"), net.in_proj_ba),
        **dict.fromkeys(BY_DELTA_NET, net),
        "gated_norm": net.norm,
        "out_proj": net.out_proj,
    }


def _of_mlp(mlp: Any) -> dict[str, Any]:
    if hasattr(mlp, "experts"):
        shared = shared_experts(mlp)
        of_shared = {} if shared is None else _of_mlp(shared)
        if (gate := getattr(mlp, "shared_expert_gate", None)) is not None:
            of_shared["gate"] = gate
        return {
            **dict.fromkeys(ROUTED, mlp.experts),
            "router": getattr(mlp, "gate", None) or mlp.router,
            **{f"shared_{op}": module for op, module in of_shared.items()},
        }
    # In the code of transformers, the kernels compute some activations in the MLP itself.
    act = mlp if isinstance(mlp, Counted) else getattr(mlp, "act_fn", mlp)
    return mlp_linears(mlp) | {"act": act}
