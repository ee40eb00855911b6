"""What the config of one family has beside that of all, from GGUF's metadata.

Defaults are llama.cpp's for a key that is absent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from intarsia_gguf.header import ValueType
from intarsia_gguf.metadata import Metadata

_Config: TypeAlias = Mapping[str, Any]


def _mixtral(metadata: Metadata, prefix: str, _: _Config) -> dict[str, Any]:
    return {"num_local_experts": metadata.integer(f"{prefix}.expert_count"), **_experts_used(metadata, prefix)}


def _qwen3_moe(metadata: Metadata, prefix: str, config: _Config) -> dict[str, Any]:
    used = _experts_used(metadata, prefix)
    width = config["intermediate_size"] // used["num_experts_per_tok"]
    return {
        "num_experts": metadata.integer(f"{prefix}.expert_count"),
        "moe_intermediate_size": metadata.integer(f"{prefix}.expert_feed_forward_length", default=width),
        **used,
    }


def _experts_used(metadata: Metadata, prefix: str) -> dict[str, int]:
    return {"num_experts_per_tok": metadata.integer(f"{prefix}.expert_used_count")}


def _granite(metadata: Metadata, prefix: str, config: _Config) -> dict[str, Any]:
    return {
        "attention_multiplier": _scale(metadata, f"{prefix}.attention.scale", config["head_dim"] ** -0.5),
        "embedding_multiplier": _scale(metadata, f"{prefix}.embedding_scale", 1.0),
        "residual_multiplier": _scale(metadata, f"{prefix}.residual_scale", 1.0),
        # The logits are divided by it, in both.
        "logits_scaling": metadata.number(f"{prefix}.logit_scale", positive=True),
    }


def _scale(metadata: Metadata, key: str, default: float) -> float:
    """Return a scale; 0 is as if it was absent."""
    return metadata.number(key, default=0.0) or default


def _phi3(metadata: Metadata, prefix: str, config: _Config) -> dict[str, Any]:
    original = metadata.integer(
        f"{prefix}.rope.scaling.original_context_length", default=config["max_position_embeddings"]
    )
    # llama.cpp lets these models see all; they were trained with the window.
    window = metadata.integer(f"{prefix}.attention.sliding_window", low=0, default=0)
    return {"original_max_position_embeddings": original, "sliding_window": window or None}


def _gemma2(metadata: Metadata, prefix: str, config: _Config) -> dict[str, Any]:
    base, key = config["rope_parameters"]["rope_theta"], f"{prefix}.rope.freq_base_swa"
    if metadata.number(key, default=base) != base:
        metadata.fail(key, f"is not {base}, the base of the other layers; this family has one for all")
    window = metadata.integer(f"{prefix}.attention.sliding_window", default=4096)
    return {
        "query_pre_attn_scalar": _attention_width(config, 46),
        **_windows(metadata, prefix, config["num_hidden_layers"], window, 2),
        "attn_logit_softcapping": _cap(metadata, f"{prefix}.attn_logit_softcapping", 50.0),
        "final_logit_softcapping": _cap(metadata, f"{prefix}.final_logit_softcapping", 30.0),
    }


def _gemma3(metadata: Metadata, prefix: str, config: _Config) -> dict[str, Any]:
    window = metadata.integer(f"{prefix}.attention.sliding_window", low=0, default=0)
    local = metadata.number(f"{prefix}.rope.freq_base_swa", positive=True, default=10_000.0)
    return {
        "query_pre_attn_scalar": _attention_width(config, 62),
        **_windows(metadata, prefix, config["num_hidden_layers"], window, 6),
        "final_logit_softcapping": _cap(metadata, f"{prefix}.final_logit_softcapping", 0.0),
        "attn_logit_softcapping": None,
        "rope_parameters": {
            "full_attention": config["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        },
    }


def _attention_width(config: _Config, largest: int) -> int:
    """Return what the scores are divided by the root of. The file does not say: the 27B's, told by layers, differ."""
    if config["num_hidden_layers"] == largest:
        return int(config["hidden_size"] // config["num_attention_heads"])
    return int(config["head_dim"])


def _windows(metadata: Metadata, prefix: str, num_layers: int, window: int, period: int) -> dict[str, Any]:
    """Return which layers have a window of this size, 0 for none.

    Where the file does not say it is all but every `period`-th: for 0 it is all of them, for 1 it is none.
    """
    key = f"{prefix}.attention.sliding_window_pattern"
    value = metadata.values.get(key)
    if value is not None and value.type is ValueType.ARRAY:
        slides = metadata.flags(key)
        if len(slides) != num_layers:
            metadata.fail(key, f"has {len(slides)} items, but there are {num_layers} layers")
    else:
        period = metadata.integer(key, low=0, default=period)
        slides = tuple(period == 0 or index % period < period - 1 for index in range(num_layers))
    types = ["sliding_attention" if window and one else "full_attention" for one in slides]
    return {"sliding_window": window or None, "layer_types": types}


def _cap(metadata: Metadata, key: str, default: float) -> float | None:
    """Return a soft cap; 0 is none."""
    return metadata.number(key, default=default) or None


#: model_type -> its own fields, of (metadata, prefix of the keys, fields that all have).
FIELDS: Mapping[str, Callable[[Metadata, str, _Config], dict[str, Any]]] = {
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "granite": _granite,
    "phi3": _phi3,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
}
