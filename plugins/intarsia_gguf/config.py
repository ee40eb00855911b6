"""A model's config as Hugging Face's config.json would have it, from GGUF's metadata and tensor names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from intarsia.errors import CheckpointError
from intarsia_gguf.architectures import Architecture
from intarsia_gguf.header import ValueType
from intarsia_gguf.metadata import LARGE, Metadata
from intarsia_gguf.rope import rope_parameters

_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"
_TOKENS = "tokenizer.ggml.tokens"


def read_config(
    metadata: Metadata,
    architecture: Architecture,
    shapes: Mapping[str, tuple[int, ...]],
    rope_divisors: np.ndarray | None,
) -> dict[str, Any]:
    """Return the config of a decoder.

    Args:
        metadata: the file's.
        architecture: its table.
        shapes: Hugging Face's tensor name -> shape, for all tensors.
        rope_divisors: see `rope_parameters`.

    Raises:
        CheckpointError: a value is missing, of the wrong type or out of range, or says what the family cannot express.
    """
    prefix = architecture.name
    _check_neutral(metadata, architecture)
    hidden_size = metadata.integer(f"{prefix}.embedding_length")
    num_heads = metadata.per_layer(f"{prefix}.attention.head_count")
    num_kv_heads = metadata.per_layer(f"{prefix}.attention.head_count_kv", default=num_heads)
    if num_heads % num_kv_heads:
        metadata.fail(
            f"{prefix}.attention.head_count_kv", f"is {num_kv_heads}, which does not divide {num_heads} heads"
        )
    head_dim = _head_dim(metadata, prefix, hidden_size, num_heads)
    return {
        "model_type": architecture.model_type,
        "architectures": [architecture.model_class],
        "vocab_size": _vocab_size(metadata, prefix, shapes, hidden_size),
        "hidden_size": hidden_size,
        "intermediate_size": metadata.per_layer(f"{prefix}.feed_forward_length"),
        "num_hidden_layers": _num_layers(metadata, prefix, shapes),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": metadata.number(f"{prefix}.attention.layer_norm_rms_epsilon", positive=True),
        "max_position_embeddings": metadata.integer(f"{prefix}.context_length"),
        "rope_parameters": rope_parameters(metadata, prefix, head_dim, rope_divisors),
        "tie_word_embeddings": _HEAD not in shapes,
        "attention_bias": any(".self_attn." in name and name.endswith(".bias") for name in shapes),
        "mlp_bias": any(".mlp." in name and name.endswith(".bias") for name in shapes),
        **_token_ids(metadata),
    }


def _check_neutral(metadata: Metadata, architecture: Architecture) -> None:
    for name, neutral in architecture.neutral.items():
        key = f"{architecture.name}.{name}"
        value = metadata.values.get(key)
        if value is not None and value.content != neutral:
            metadata.fail(
                key, f"is {value.content!r:.100}, which this family does not have; only {neutral!r} is supported"
            )


def _head_dim(metadata: Metadata, prefix: str, hidden_size: int, num_heads: int) -> int:
    key = f"{prefix}.attention.key_length"
    if key not in metadata and hidden_size % num_heads:
        metadata.fail(
            f"{prefix}.attention.head_count", f"is {num_heads}, which does not divide the width {hidden_size}"
        )
    head_dim = metadata.integer(key, default=hidden_size // num_heads)
    if head_dim % 2:
        metadata.fail(f"{prefix}.attention.head_count", f"gives heads of {head_dim} dimensions, an odd number")
    for name in ("attention.value_length", "rope.dimension_count"):
        value = metadata.integer(f"{prefix}.{name}", default=head_dim)
        if value != head_dim:
            metadata.fail(f"{prefix}.{name}", f"is {value}, but the head has {head_dim} dimensions; both must be equal")
    return head_dim


def _num_layers(metadata: Metadata, prefix: str, shapes: Mapping[str, tuple[int, ...]]) -> int:
    num_layers = metadata.integer(f"{prefix}.block_count")
    # A layer has several tensors: what is asked for is bounded by what the file holds.
    if num_layers > len(shapes):
        metadata.fail(f"{prefix}.block_count", f"is {num_layers}, but the file has only {len(shapes)} tensors")
    return num_layers


def _vocab_size(metadata: Metadata, prefix: str, shapes: Mapping[str, tuple[int, ...]], hidden_size: int) -> int:
    shape = shapes.get(_EMBEDDING)
    if shape is None:
        raise CheckpointError(f"{metadata.path}: tensor 'token_embd.weight' is missing")
    if len(shape) != 2 or shape[1] != hidden_size:
        raise CheckpointError(
            f"{metadata.path}: tensor 'token_embd.weight' has the shape {shape}, not (vocabulary, {hidden_size})"
        )
    stated = metadata.integer(f"{prefix}.vocab_size", default=shape[0])
    if stated != shape[0]:
        metadata.fail(f"{prefix}.vocab_size", f"is {stated}, but tensor 'token_embd.weight' has {shape[0]} rows")
    if _TOKENS in metadata and (num_tokens := len(metadata.texts(_TOKENS))) != shape[0]:
        metadata.fail(_TOKENS, f"has {num_tokens} items, but tensor 'token_embd.weight' has {shape[0]} rows")
    return shape[0]


def _token_ids(metadata: Metadata) -> dict[str, int]:
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    keys = {name: f"tokenizer.ggml.{short}_token_id" for name, short in names.items()}
    return {name: metadata.integer(key, low=0) for name, key in keys.items() if key in metadata}


def read_sampling(metadata: Metadata) -> dict[str, float]:
    """Return what `general.sampling.*` recommends, by Hugging Face's names; newer converters write it.

    Left out is what has no such name: the order of samplers, XTC, mirostat. In llama.cpp, `penalty_repeat` sees the
    last `penalty_last_n` tokens alone; here it sees all, and only the 0 that switches it off counts.

    Raises:
        CheckpointError: a value is of the wrong type.
    """
    prefix = "general.sampling"
    read: dict[str, float] = {
        name: _float(metadata, f"{prefix}.{short}")
        for short, name in (
            ("temp", "temperature"),
            ("top_p", "top_p"),
            ("min_p", "min_p"),
            ("penalty_repeat", "repetition_penalty"),
        )
        if f"{prefix}.{short}" in metadata
    }
    # For llama.cpp, 0 and less switch these off, and are greedy.
    if "temperature" in read:
        read["temperature"] = max(0.0, read["temperature"])
    if f"{prefix}.top_k" in metadata:
        read["top_k"] = max(0, metadata.integer(f"{prefix}.top_k", low=-LARGE))
    if metadata.integer(f"{prefix}.penalty_last_n", low=-LARGE, default=-1) == 0:
        read.pop("repetition_penalty", None)
    return read


def _float(metadata: Metadata, key: str) -> float:
    """Return a number as its author wrote it: 0.6, not the 0.6000000238418579 that float32 makes of it."""
    value = metadata.number(key)
    return float(str(np.float32(value))) if metadata.values[key].type is ValueType.FLOAT32 else value
