"""The llama family: RMS norm, rotary attention with grouped heads, a gated SiLU feed-forward.

Llama 1 to 3, SmolLM, SmolLM2, TinyLlama and whatever else says `model_type: llama`. Names and meaning of the config are
those of transformers' `LlamaConfig`. Importing this module needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from attrs import frozen

from intarsia.errors import CheckpointError
from intarsia.protocols import ModelContext
from intarsia.types import (
    AttentionSpec,
    DecoderSpec,
    Fit,
    LayerSpec,
    MlpSpec,
    RopeSpec,
    TensorSource,
    Unfit,
    WeightMap,
)

FAMILY = "llama"

_HEAD = "lm_head.weight"
_ROPE_KINDS = ("default", "linear", "llama3")
#: transformers' default, taken only where a config gives no theta at all.
_DEFAULT_THETA = 10_000.0
#: Sizes past these are mistakes or attacks; no model comes near.
_MAX_LAYERS, _MAX_HEADS, _MAX_DIM, _MAX_LEN = 4096, 65_536, 1 << 24, 1 << 31
_REQUIRED: Any = object()


def fit(context: ModelContext) -> Fit | Unfit:
    """Fit what calls itself llama."""
    kind = context.config.get("model_type")
    if kind == FAMILY:
        return Fit(50, "model_type is llama")
    return Unfit(f"the checkpoint's model_type is {kind!r}, not 'llama'")


def build(_: ModelContext) -> Llama:
    """Make the family."""
    return Llama()


@frozen
class Llama:
    """Turns a llama config into a DecoderSpec, and says which tensors make its weights."""

    def spec(self, config: Mapping[str, Any], tensor_names: frozenset[str]) -> DecoderSpec:
        """Return the model.

        The head is the embedding where the checkpoint has no `lm_head.weight`, unless the config says that they differ.
        Where it has one it is used, whatever the flag says, as transformers 5 does.

        Raises:
            CheckpointError: a field is missing, out of range, or asks for what this family does not know.
        """
        fields = _Fields(config)
        _refuse_unknown_math(fields)
        embed_dim = fields.size("hidden_size")
        attention = _attention(fields, embed_dim)
        if fields.get("hidden_act", "silu") != "silu":
            raise fields.wrong("hidden_act", "'silu', the one activation that is known")
        mlp = MlpSpec(ffn_dim=fields.size("intermediate_size"), activation="silu", bias=fields.flag("mlp_bias"))
        layer = LayerSpec(attention=attention, mlp=mlp)
        return DecoderSpec(
            family=FAMILY,
            vocab_size=fields.size("vocab_size"),
            embed_dim=embed_dim,
            max_len=_max_len(fields),
            norm_eps=fields.number("rms_norm_eps", 1e-6, low=0.0),
            tied=_tied(fields, tensor_names),
            layers=(layer,) * fields.size("num_hidden_layers", high=_MAX_LAYERS),
        )

    def weight_map(self, spec: DecoderSpec) -> WeightMap:
        """Return where each weight comes from; queries, keys and values are one matrix, gate and up another."""
        embedding = ("model.embed_tokens.weight", (spec.vocab_size, spec.embed_dim))
        tensors = {"embed.weight": _source(embedding)}
        for index, layer in enumerate(spec.layers):
            tensors |= {f"layers.{index}.{name}": source for name, source in _layer(index, layer, spec.embed_dim)}
        tensors["norm.weight"] = _source(("model.norm.weight", (spec.embed_dim,)))
        if not spec.tied:
            tensors["head.weight"] = _source((_HEAD, embedding[1]))
        # Old checkpoints store the rotary frequencies, which follow from the config.
        return WeightMap(tensors, ignored=("*.rotary_emb.inv_freq",))


@frozen
class _Fields:
    """A config whose values are checked as they are read. `prefix` is the path of a nested table."""

    values: Mapping[str, Any]
    prefix: str = ""

    def get(self, name: str, default: Any = _REQUIRED) -> Any:
        """Return a value; null is the same as absent."""
        value = self.values.get(name)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise CheckpointError(f"config: {self.prefix}{name} is missing", field=f"{self.prefix}{name}")
        return default

    def wrong(self, name: str, right: str) -> CheckpointError:
        """Return the error for a value that is not what is right."""
        shown = repr(self.values.get(name))
        shown = shown if len(shown) <= 200 else f"{shown[:200]}..."
        path = f"{self.prefix}{name}"
        return CheckpointError(f"config: {path} is {shown}, not {right}", field=path)

    def size(self, name: str, default: Any = _REQUIRED, *, high: int = _MAX_DIM) -> int:
        """Return a whole number from 1 to `high`."""
        value = self.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= high:
            raise self.wrong(name, f"a whole number from 1 to {high}")
        return value

    def number(self, name: str, default: Any = _REQUIRED, *, low: float) -> float:
        """Return a finite number above `low`."""
        value = self.get(name, default)
        # Whole numbers past the range of a float are refused as infinite.
        known = isinstance(value, int | float) and not isinstance(value, bool)
        if not known or not low < value < 1e300 or not math.isfinite(value):
            raise self.wrong(name, f"a finite number above {low:g}")
        return float(value)

    def flag(self, name: str) -> bool:
        """Return true or false; absent is false."""
        value = self.get(name, False)
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value


def _refuse_unknown_math(fields: _Fields) -> None:
    """Refuse what would change the model's result and is not implemented: a wrong answer is worse than none."""
    if fields.get("quantization_config", None) is not None:
        raise fields.wrong("quantization_config", "absent; quantized Hugging Face checkpoints are not supported yet")
    if fields.get("pretraining_tp", 1) != 1:
        raise fields.wrong("pretraining_tp", "1")
    if fields.get("sliding_window", None) is not None:
        raise fields.wrong("sliding_window", "absent; llama attends to all keys")
    layer_types = fields.get("layer_types", ())
    if not isinstance(layer_types, list | tuple) or any(kind != "full_attention" for kind in layer_types):
        raise fields.wrong("layer_types", "'full_attention' for every layer")
    architectures = fields.get("architectures", ())
    known = isinstance(architectures, list | tuple) and all(isinstance(name, str) for name in architectures)
    if not known or (architectures and not any(name.lower().endswith("forcausallm") for name in architectures)):
        raise fields.wrong("architectures", "['LlamaForCausalLM']")


def _attention(fields: _Fields, embed_dim: int) -> AttentionSpec:
    num_heads = fields.size("num_attention_heads", high=_MAX_HEADS)
    num_kv_heads = fields.size("num_key_value_heads", num_heads, high=_MAX_HEADS)
    if num_heads % num_kv_heads:
        raise fields.wrong("num_key_value_heads", f"a divisor of num_attention_heads ({num_heads})")
    if fields.get("head_dim", None) is None and embed_dim % num_heads:
        raise fields.wrong("hidden_size", f"a multiple of num_attention_heads ({num_heads}), and head_dim is not given")
    head_dim = fields.size("head_dim", embed_dim // num_heads, high=_MAX_HEADS)
    if head_dim % 2:
        raise CheckpointError(f"config: head_dim is {head_dim}, not even, as rotary pairs need", field="head_dim")
    bias = fields.flag("attention_bias")
    return AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=_rope(fields, head_dim),
        qkv_bias=bias,
        out_bias=bias,
    )


def _max_len(fields: _Fields) -> int:
    return fields.size("max_position_embeddings", 2048, high=_MAX_LEN)


def _tied(fields: _Fields, tensor_names: frozenset[str]) -> bool:
    if _HEAD in tensor_names:
        fields.flag("tie_word_embeddings")
        return False
    if fields.get("tie_word_embeddings", True) is not True:
        fields.flag("tie_word_embeddings")
        raise CheckpointError(
            f"the checkpoint has no {_HEAD}, and config's tie_word_embeddings is false: the head is missing",
            field="tie_word_embeddings",
        )
    return True


def _rope(fields: _Fields, head_dim: int) -> RopeSpec:
    """Read `rope_scaling` (transformers 4) or `rope_parameters` (5), with the precedence of transformers 5."""
    name, table = _rope_table(fields)
    rope = _Fields(table, prefix=f"{name}.")
    for where in (fields, rope):
        if where.get("partial_rotary_factor", 1) != 1:
            raise where.wrong("partial_rotary_factor", "1; llama rotates whole heads")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in _ROPE_KINDS:
        spelling = "rope_type" if table.get("rope_type") is not None else "type"
        raise rope.wrong(spelling, f"one of the rope kinds that are known: {', '.join(_ROPE_KINDS)}")
    if kind == "default":
        unread = [key for key, value in table.items() if isinstance(value, dict)]
        if unread or ("factor" in table and "rope_type" not in table and "type" not in table):
            key = unread[0] if unread else "factor"
            raise rope.wrong(key, "part of rope kind 'default'; rope_type must name the kind, one for all layers")
    base = _theta(fields, rope)
    if kind == "default":
        return RopeSpec(kind="default", base=base, dim=head_dim)
    factor = rope.number("factor", low=0.0)
    if kind == "linear":
        return RopeSpec(kind="linear", base=base, dim=head_dim, factor=factor)
    low, high = rope.number("low_freq_factor", low=0.0), rope.number("high_freq_factor", low=0.0)
    if high <= low:
        raise rope.wrong("high_freq_factor", f"above low_freq_factor ({low:g})")
    original = "original_max_position_embeddings"
    source = fields if fields.get(original, None) is not None else rope
    return RopeSpec(
        kind="llama3",
        base=base,
        dim=head_dim,
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_len=source.size(original, _max_len(fields), high=_MAX_LEN),
    )


def _rope_table(fields: _Fields) -> tuple[str, Mapping[str, Any]]:
    for name in ("rope_scaling", "rope_parameters"):
        table = fields.get(name, {})
        if not isinstance(table, dict):
            raise fields.wrong(name, "an object or null")
        if table:
            return name, table
    return "rope_parameters", {}


def _theta(fields: _Fields, rope: _Fields) -> float:
    """Return the base: the table's, else the config's; a default only where no theta is given anywhere."""
    if rope.get("rope_theta", None) is not None:
        return rope.number("rope_theta", low=0.0)
    if fields.get("rope_theta", None) is not None:
        return fields.number("rope_theta", low=0.0)
    other = fields.get("rope_parameters", {})
    if isinstance(other, dict) and other.get("rope_theta") is not None:
        raise CheckpointError(
            f"config: rope_scaling rules out rope_parameters, whose rope_theta {other['rope_theta']!r} would be lost; "
            "give one of the two",
            field="rope_scaling",
        )
    return _DEFAULT_THETA


def _source(*parts: tuple[str, tuple[int, ...]]) -> TensorSource:
    return TensorSource(tuple(name for name, _ in parts), tuple(shape for _, shape in parts))


def _layer(index: int, layer: LayerSpec, embed_dim: int) -> Iterator[tuple[str, TensorSource]]:
    """Yield the sources of one layer, in the order they are used."""
    prefix = f"model.layers.{index}"
    attention, mlp = layer.attention, layer.mlp
    q_dim, kv_dim = attention.num_heads * attention.head_dim, attention.num_kv_heads * attention.head_dim
    qkv = (("self_attn.q_proj", q_dim), ("self_attn.k_proj", kv_dim), ("self_attn.v_proj", kv_dim))
    gate_up = (("mlp.gate_proj", mlp.ffn_dim), ("mlp.up_proj", mlp.ffn_dim))

    def linear(
        name: str, rows: tuple[tuple[str, int], ...], columns: int, *, bias: bool
    ) -> Iterator[tuple[str, TensorSource]]:
        yield f"{name}.weight", _source(*((f"{prefix}.{part}.weight", (count, columns)) for part, count in rows))
        if bias:
            yield f"{name}.bias", _source(*((f"{prefix}.{part}.bias", (count,)) for part, count in rows))

    yield "attention_norm.weight", _source((f"{prefix}.input_layernorm.weight", (embed_dim,)))
    yield from linear("qkv", qkv, embed_dim, bias=attention.qkv_bias)
    yield from linear("out", (("self_attn.o_proj", embed_dim),), q_dim, bias=attention.out_bias)
    yield "mlp_norm.weight", _source((f"{prefix}.post_attention_layernorm.weight", (embed_dim,)))
    yield from linear("gate_up", gate_up, embed_dim, bias=mlp.bias)
    yield from linear("down", (("mlp.down_proj", embed_dim),), mlp.ffn_dim, bias=mlp.bias)
