"""Mistral: llama whose layers may all see a sliding window (Jiang et al. 2023)."""

from __future__ import annotations

from intarsia.families import Family, Fields, attention, decoder, head_dim, mlp, num_layers, read_rope, windows
from intarsia.types import DecoderSpec, LayerSpec

#: Of transformers' MistralConfig.
_DEFAULTS = {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096}


def _read(fields: Fields, tensor_names: frozenset[str]) -> DecoderSpec:
    fields = fields.over(_DEFAULTS)
    # Mixed layer_types are another family, ministral: transformers would give every layer here the window.
    slides = fields.has("sliding_window")
    if fields.has("layer_types"):
        known = "sliding_attention" if slides else "full_attention"
        fields.texts("layer_types", (known,), num_layers(fields))
    rope = read_rope(fields, head_dim(fields))
    layers = [
        LayerSpec(attention=attention(fields, rope, window=window), mlp=mlp(fields))
        for window in windows(fields, [slides] * num_layers(fields))
    ]
    return decoder("mistral", fields, tensor_names, layers)


FAMILY = Family(_read)
