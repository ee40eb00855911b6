"""A model's config as Hugging Face's config.json would have it, from GGUF's metadata and tensor names."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from intarsia.errors import CheckpointError
from intarsia_gguf.architectures import Architecture
from intarsia_gguf.fields import FIELDS
from intarsia_gguf.header import ValueType
from intarsia_gguf.metadata import LARGE, Metadata
from intarsia_gguf.rope import RopeTensors, rope_parameters
from intarsia_gguf.tensors import Heads

_EMBEDDING = "token_embd.weight"
_HEAD = "output.weight"
_TOKENS = "tokenizer.ggml.tokens"
#: More than models have; each is a tensor of its own.
MAX_EXPERTS = 4096
#: Fields that say whether there are biases -> which.
_BIASES = {
    "attention_bias": re.compile(r"blk\.\d+\.attn_(q|k|v|qkv|output)\.bias"),
    "mlp_bias": re.compile(r"blk\.\d+\.ffn_(gate|up|down)\.bias"),
}


def read_heads(metadata: Metadata, architecture: Architecture) -> Heads:
    """Return the heads of attention; raise CheckpointError where they do not fit one another or the width."""
    prefix = architecture.name
    hidden_size = metadata.integer(f"{prefix}.embedding_length")
    num_heads = metadata.per_layer(f"{prefix}.attention.head_count")
    num_kv_heads = metadata.per_layer(f"{prefix}.attention.head_count_kv", default=num_heads)
    if num_heads % num_kv_heads:
        metadata.fail(
            f"{prefix}.attention.head_count_kv", f"is {num_kv_heads}, which does not divide {num_heads} heads"
        )
    key = f"{prefix}.attention.key_length"
    if key not in metadata and hidden_size % num_heads:
        metadata.fail(
            f"{prefix}.attention.head_count", f"is {num_heads}, which does not divide the width {hidden_size}"
        )
    head_dim = metadata.integer(key, default=hidden_size // num_heads)
    if head_dim % 2 and architecture.rope != "none":
        metadata.fail(f"{prefix}.attention.head_count", f"gives heads of {head_dim} dimensions, an odd number")
    _must_equal(metadata, f"{prefix}.attention.value_length", head_dim)
    if architecture.rope == "whole":
        _must_equal(metadata, f"{prefix}.rope.dimension_count", head_dim)
    return Heads(num_heads, num_kv_heads, head_dim)


def _must_equal(metadata: Metadata, key: str, head_dim: int) -> None:
    value = metadata.integer(key, default=head_dim)
    if value != head_dim:
        metadata.fail(key, f"is {value}, but the head has {head_dim} dimensions; both must be equal")


def read_config(
    metadata: Metadata,
    architecture: Architecture,
    heads: Heads,
    shapes: Mapping[str, tuple[int, ...]],
    rope_tensors: RopeTensors,
) -> dict[str, Any]:
    """Return the config of a decoder.

    Args:
        metadata: the file's.
        architecture: its table.
        heads: what `read_heads` gives.
        shapes: GGUF's tensor name -> shape, for all tensors.
        rope_tensors: the file's.

    Raises:
        CheckpointError: a value is missing, of the wrong type or out of range, or says what the family cannot express.
    """
    prefix = architecture.name
    _check_neutral(metadata, architecture)
    hidden_size = metadata.integer(f"{prefix}.embedding_length")
    config: dict[str, Any] = {
        "model_type": architecture.model_type,
        "architectures": [architecture.model_class],
        "vocab_size": _vocab_size(metadata, prefix, shapes, hidden_size),
        "hidden_size": hidden_size,
        "intermediate_size": metadata.per_layer(f"{prefix}.feed_forward_length"),
        "num_hidden_layers": _num_layers(metadata, prefix, shapes),
        "num_attention_heads": heads.num_heads,
        "max_position_embeddings": metadata.integer(f"{prefix}.context_length"),
        **_epsilon(metadata, architecture),
        "tie_word_embeddings": _HEAD not in shapes,
        **{name: any(map(_BIASES[name].fullmatch, shapes)) for name in architecture.biases},
        **architecture.constants,
        **_token_ids(metadata),
    }
    if architecture.rope != "none":
        config |= {"num_key_value_heads": heads.num_kv_heads, "head_dim": heads.head_dim}
        config |= _rope(metadata, architecture, heads.head_dim, rope_tensors)
    special = FIELDS.get(architecture.model_type)
    if special is not None:
        config |= special(metadata, prefix, config)
    return {architecture.renamed.get(name, name): value for name, value in config.items()}


def _check_neutral(metadata: Metadata, architecture: Architecture) -> None:
    for name, neutral in architecture.neutral.items():
        key = f"{architecture.name}.{name}"
        value = metadata.values.get(key)
        if value is not None and value.content not in neutral:
            metadata.fail(
                key,
                f"is {value.content!r:.100}, which this family does not have; "
                f"only {' or '.join(map(repr, neutral))} is supported",
            )


def _epsilon(metadata: Metadata, architecture: Architecture) -> dict[str, float]:
    name, key = {
        "rms": ("rms_norm_eps", "attention.layer_norm_rms_epsilon"),
        "layer": ("layer_norm_eps", "attention.layer_norm_epsilon"),
    }[architecture.norm]
    return {name: metadata.number(f"{architecture.name}.{key}", positive=True)}


def _rope(metadata: Metadata, architecture: Architecture, head_dim: int, tensors: RopeTensors) -> dict[str, Any]:
    key = f"{architecture.name}.rope.dimension_count"
    dim = metadata.integer(key, high=head_dim, default=head_dim)
    if dim % 2:
        metadata.fail(key, f"is {dim}, an odd number")
    parameters = rope_parameters(metadata, architecture.name, dim, tensors)
    if architecture.rope == "partial":
        parameters["partial_rotary_factor"] = _fraction(dim, head_dim)
    return {"rope_parameters": parameters}


def _fraction(dim: int, head_dim: int) -> float:
    """Return the share of a head's dimensions that gives `dim` of them once it is multiplied and cut to a whole."""
    share = dim / head_dim
    return share if int(head_dim * share) == dim else math.nextafter(share, math.inf)


def _num_layers(metadata: Metadata, prefix: str, shapes: Mapping[str, tuple[int, ...]]) -> int:
    num_layers = metadata.integer(f"{prefix}.block_count")
    # A layer has several tensors: what is asked for is bounded by what the file holds.
    if num_layers > len(shapes):
        metadata.fail(f"{prefix}.block_count", f"is {num_layers}, but the file has only {len(shapes)} tensors")
    return num_layers


def _vocab_size(metadata: Metadata, prefix: str, shapes: Mapping[str, tuple[int, ...]], hidden_size: int) -> int:
    shape = shapes.get(_EMBEDDING)
    if shape is None:
        raise CheckpointError(f"{metadata.path}: tensor {_EMBEDDING!r} is missing")
    if len(shape) != 2 or shape[1] != hidden_size:
        raise CheckpointError(
            f"{metadata.path}: tensor {_EMBEDDING!r} has the shape {shape}, not (vocabulary, {hidden_size})"
        )
    stated = metadata.integer(f"{prefix}.vocab_size", default=shape[0])
    if stated != shape[0]:
        metadata.fail(f"{prefix}.vocab_size", f"is {stated}, but tensor {_EMBEDDING!r} has {shape[0]} rows")
    if _TOKENS in metadata and (num_tokens := len(metadata.texts(_TOKENS))) != shape[0]:
        metadata.fail(_TOKENS, f"has {num_tokens} items, but tensor {_EMBEDDING!r} has {shape[0]} rows")
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
