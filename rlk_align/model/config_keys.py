"""The keys of config.json that change no log-prob, or that every family knows, and the refusal of
all others.

An engine may ignore a setting that the other engine obeys. A tool that ignores it as well blames
the wrong side, so a setting that no description covers is refused by its name.
"""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rlk_align.errors import ModelError
from rlk_align.model.family import Family
from rlk_align.text import short_printable

_TOKENISER = frozenset(
    {
        *("pad_token_id", "bos_token_id", "eos_token_id", "unk_token_id", "sep_token_id"),
        *("cls_token_id", "mask_token_id", "decoder_start_token_id", "tokenizer_class"),
        *("model_max_length", "tokenizer_model_max_length", "tokenizer_padding_side"),
        "eod_token_id",
    }
)
_TRAINING = frozenset(
    {
        *("initializer_range", "attention_dropout", "residual_dropout", "hidden_dropout"),
        *("resid_pdrop", "embd_pdrop", "attn_pdrop", "router_aux_loss_coef", "router_z_loss_coef"),
        *("router_jitter_noise", "output_router_logits", "aux_loss_alpha", "seq_aux"),
        *("pretraining_tp", "gradient_checkpointing", "neftune_noise_alpha", "attn_dropout"),
    }
)
_GENERATION = frozenset(
    {
        *("max_length", "max_new_tokens", "min_length", "do_sample", "early_stopping"),
        *("num_beams", "num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p"),
        *("typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size"),
        *("encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences"),
        *("return_dict_in_generate", "output_scores", "forced_bos_token_id"),
        *("forced_eos_token_id", "remove_invalid_values", "suppress_tokens"),
        *("begin_suppress_tokens", "exponential_decay_length_penalty"),
    }
)
"""Defaults of sampling, which the tool passes to every engine itself."""
_RECORDS = frozenset(
    {
        *("architectures", "transformers_version", "_name_or_path", "_commit_hash", "use_cache"),
        *("_attn_implementation", "_attn_implementation_autoset", "attn_implementation"),
        *("id2label", "label2id", "problem_type", "finetuning_task", "task_specific_params"),
        *("return_dict", "output_attentions", "output_hidden_states", "torchscript", "prefix"),
        *("chunk_size_feed_forward", "is_encoder_decoder", "is_decoder", "add_cross_attention"),
        *("cross_attention_hidden_size", "tie_encoder_decoder", "pruned_heads", "use_bfloat16"),
        *("cache_implementation", "tf_legacy_loss", "unsloth_fixed", "unsloth_version"),
        *("model_name", "is_llama_config", "transformers.js_config"),
    }
)
"""Labels and switches that no decoder's log-probs depend on."""
NO_EFFECT = _TOKENISER | _TRAINING | _GENERATION | _RECORDS
"""The keys of config.json that change no log-prob."""
OF_EVERY_FAMILY = frozenset(
    {
        *("model_type", "dtype", "torch_dtype", "vocab_size", "hidden_size", "intermediate_size"),
        *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
        *("max_position_embeddings", "hidden_act", "rms_norm_eps", "tie_word_embeddings"),
        *("attention_bias", "mlp_bias", "rope_theta", "rope_scaling", "rope_parameters"),
        # These are refused elsewhere, with their own reasons.
        *("partial_rotary_factor", "quantization_config", "compression_config", "auto_map"),
    }
)
"""The keys that describe a decoder of any family."""
_ROPE = frozenset(
    {
        *("rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "low_freq_factor"),
        *("high_freq_factor", "original_max_position_embeddings", "max_position_embeddings"),
        *("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate"),
        *("short_factor", "long_factor", "short_mscale", "long_mscale"),
    }
)
"""The parameters of the kinds of rope; an engine that lacks a kind refuses it by `rope_type`."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    # Gemma 4's "vision" is for tokens of images.
    **{"is_causal": (None, True), "use_bidirectional_attention": (None, False, "vision")},
    # Of these, engines have one form of gates, and keep the states of delta nets in float32.
    **{"attn_output_gate": (None, True), "output_gate_type": (None, "silu", "swish")},
    "mamba_ssm_dtype": (None, "float32"),
    **dict.fromkeys(
        (
            *("embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale"),
            *("lm_head_multiplier", "routed_scaling_factor"),
        ),
        (None, 1),
    ),
}
"""Settings whose neutral values are not the usual ones."""
_USUAL_NEUTRAL: tuple[Any, ...] = (None, False, 0, "", [], {})
EFFECTS = {
    "llama_4_scaling_beta": "attention's scale by the position",
    "llama_4_scaling": "attention's scale by the position",
    "attn_temperature_tuning": "attention's scale by the position",
    "query_pre_attn_scalar": "attention's scale",
    "attention_multiplier": "attention's scale",
    "attn_logit_softcapping": "attention's scores",
    "final_logit_softcapping": "the logits",
    "logits_scaling": "the logits",
    "logit_scale": "the logits",
    "embedding_multiplier": "the embedding",
    "residual_multiplier": "what is added to the residual stream",
    "clip_qkv": "q, k and v",
    "mrope_section": "the rotation",
    "mrope_interleaved": "the rotation",
    "rope_local_base_freq": "the rotation of some layers",
    "no_rope_layers": "which layers rotate",
    "no_rope_layer_interval": "which layers rotate",
    "sliding_window": "which keys attention sees",
    "attention_chunk_size": "which keys attention sees",
    "dual_chunk_attention_config": "which keys attention sees",
    "layer_types": "the kind of attention of each layer",
    "use_bidirectional_attention": "which keys attention sees",
    "is_causal": "which keys attention sees",
    "hidden_activation": "the activation",
    "use_qk_norm": "whether q and k are normed",
    "swiglu_limit": "the activation",
    "hidden_size_per_layer_input": "what each layer adds of embeddings of its own",
    "num_kv_shared_layers": "which layers take keys and values of another",
    "enable_moe_block": "the MLP",
    "attn_output_gate": "the output of attention",
    "output_gate_type": "the norm after a gated delta net",
    "mamba_ssm_dtype": "the precision of the states of gated delta nets",
}
"""Settings of config.json -> the values that they change, for the error that refuses them."""
PAGE = "docs/add-a-family.md"
"""The page on describing a family."""


def unknown_settings(
    config: Mapping[str, Any],
    known: Collection[str],
    values: Mapping[str, tuple[Any, ...]] = MappingProxyType({}),
) -> dict[str, Any]:
    """Path of a key -> its value, for the settings that are not neutral and that neither every
    family nor this one lists.

    `known`: the further keys of the family; a parameter of its rope is listed as
    `rope_parameters.KEY`, and ropes by the kind of layer as `rope_parameters.KIND`; `values`: keys
    of which the family lists values, and any other is unknown. `use_sliding_window: false` makes
    the settings of windows neutral.
    """
    known = {*known, *OF_EVERY_FAMILY, *NO_EFFECT}
    if config.get("use_sliding_window") is False:
        known |= {"sliding_window", "max_window_layers"}
    listed = (key.removeprefix("layer_types.") for key in known if key.startswith("layer_types."))
    kinds = ["full_attention", *listed]
    found = {
        key: value
        for key, value in config.items()
        if (key in values or key not in known) and not _is_neutral(key, value, values)
    }
    if not all(kind in kinds for kind in config.get("layer_types") or ()):
        found["layer_types"] = config["layer_types"]
    for key in ("rope_parameters", "rope_scaling"):
        ropes = config.get(key)
        if isinstance(ropes, Mapping):
            found |= dict(_unknown_rope(key, ropes, known))
    return found


def _is_neutral(key: str, value: Any, values: Mapping[str, tuple[Any, ...]]) -> bool:
    if key in values:
        return value is None or value in values[key]
    return key == "layer_types" or value in _NEUTRAL.get(key, _USUAL_NEUTRAL)


def _unknown_rope(
    path: str, rope: Mapping[str, Any], known: Collection[str]
) -> Iterator[tuple[str, Any]]:
    for key, value in rope.items():
        if key in ("full_attention", "sliding_attention") and "rope_parameters.KIND" in known:
            if isinstance(value, Mapping):
                yield from _unknown_rope(f"{path}.{key}", value, known)
            continue
        listed = key in _ROPE or f"rope_parameters.{key}" in known
        if not listed and value not in _USUAL_NEUTRAL:
            yield f"{path}.{key}", value


def check_own_code(model: Path, config: Mapping[str, Any]) -> tuple[str, ...]:
    """A warning if config.json names code in the checkpoint of which the engines have their own:
    its class has the name of the model_type. Raises ModelError for any other code."""
    if not (own := config.get("auto_map")):
        return ()
    kind = str(config.get("model_type"))
    named = own.get("AutoModelForCausalLM") if isinstance(own, Mapping) else None
    if isinstance(named, str) and _letters(named.rpartition(".")[2]) == _letters(kind) + _CAUSAL:
        return (
            f"auto_map in config.json names code in the checkpoint, {named}, which no engine here "
            f"runs: the engines' own code for model_type {kind!r} is compared",
        )
    raise ModelError(
        f"{model}/config.json: auto_map names code in the checkpoint, which no engine here "
        "runs: whether that code computes what the engines' own code does is unknown",
        "remove auto_map from config.json to compare the engines' own code",
    )


_CAUSAL = "forcausallm"


def _letters(name: str) -> str:
    return name.replace("_", "").lower()


def check_settings(model: Path, config: Mapping[str, Any], family: Family) -> tuple[str, ...]:
    """The warnings about config.json. Raises ModelError if it, or the default of a key that it
    leaves out, has a setting that neither every family nor this one lists, or if it names code in
    the checkpoint that the engines do not have."""
    warnings = check_own_code(model, config)
    config = {**family.uncovered, **config}
    unknown = unknown_settings(config, family.keys, family.values)
    if not unknown:
        return warnings
    path, value = next(iter(unknown.items()))
    changes = EFFECTS.get(path.rpartition(".")[2])
    effect = f"changes {changes}, and" if changes else "may change log-probs, and"
    more = [each for each in unknown if each != path]
    others = f" (nor does it say what {', '.join(more)} change)" if more else ""
    setting = f"{path} = {short_printable(repr(value), 60)}"
    raise ModelError(
        f"{model}/config.json: {setting} {effect} the description of family "
        f"{config.get('model_type')!r} does not say how{others}",
        "`compare --modules` compares any model, module by module; the log-probs of any model can "
        "be judged: `import` and `explain` a dump of the run; "
        f"{PAGE} shows how to describe a setting",
    )
