"""Mistral: llama whose layers may all see a sliding window (Jiang et al. 2023)."""

from __future__ import annotations

from intarsia.families import Family, Fields, attention, decoder, head_dim, mlp, num_layers, one_window, read_rope
from intarsia.types import DecoderSpec, LayerSpec

#: Of transformers' MistralConfig.
_DEFAULTS = {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096}


def _read(fields: Fields, tensor_names: frozenset[str]) -> DecoderSpec:
    fields = fields.over(_DEFAULTS)
    layer = LayerSpec(
        attention=attention(fields, read_rope(fields, head_dim(fields)), window=one_window(fields)),
        mlp=mlp(fields),
    )
    return decoder("mistral", fields, tensor_names, [layer] * num_layers(fields))


FAMILY = Family(_read)
