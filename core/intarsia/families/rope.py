"""Reading rotary embeddings: `rope_scaling` (transformers 4) or `rope_parameters` (5), whole or per layer type."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

from attrs import frozen

from intarsia.errors import CheckpointError
from intarsia.families.fields import MAX_LEN, Fields
from intarsia.types import RopeSpec

#: transformers' default, taken only where a config gives no theta at all.
_DEFAULT_THETA: Final = 10_000.0
_ORIGINAL: Final = "original_max_position_embeddings"
_PARTIAL: Final = "partial_rotary_factor"
#: Layer type -> the config's own name of its theta, as Gemma 3 was saved by transformers 4.
_LAYER_THETAS: Final = {"full_attention": "rope_theta", "sliding_attention": "rope_local_base_freq"}
#: What no table without a kind may hold: it would have no effect.
_SCALING: Final = frozenset(
    {"factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"}
    | {"low_freq_factor", "high_freq_factor", "short_factor", "long_factor"}
)
#: Factors past these overflow in float32; no model comes near.
_LOW, _HIGH = 1e-6, 1e6


def read_rope(
    fields: Fields,
    head_dim: int,
    layer_type: str | None = None,
    *,
    partial: float | None = None,
    default_theta: float = _DEFAULT_THETA,
) -> RopeSpec:
    """Return the rotary embedding that a config describes, with the precedence of transformers 5.

    Args:
        fields: the config.
        head_dim: dimensions of a head.
        layer_type: `full_attention` or `sliding_attention`, for a family whose layer types have tables of their own.
            Read as transformers' Gemma 3: `rope_scaling` and `rope_theta` are the full layers', and
            `rope_local_base_freq` is the sliding ones'. None is for a family that has one table.
        partial: for a family that can rotate a part of each head: the fraction where the config has no
            `partial_rotary_factor`. None is for a family that rotates whole heads. As in transformers, the factor
            then changes nothing under kind `default`; with another kind, which transformers cannot run, it is refused.
        default_theta: the base where the config gives none.

    Raises:
        CheckpointError: a value is missing, malformed or of a kind that is not known; names it.
    """
    rope = _table(fields) if layer_type is None else _layer_table(fields, layer_type)
    spelling = "rope_type" if rope.has("rope_type") else "type"
    read: Callable[[_Table], RopeSpec] = rope.choice(spelling, _READERS, "default")
    for key, value in rope.values.items():
        if isinstance(value, Mapping):
            raise rope.wrong(key, "part of a rope table that is one for all layers")
        if key in _SCALING and value is not None and not rope.has(spelling):
            raise rope.wrong(key, "part of rope kind 'default'; rope_type must name the kind")
    dim = _rotated(fields, rope, head_dim, partial, whole_is_known=read is _default)
    base = _theta(fields, rope, layer_type, default_theta)
    return read(_Table(config=fields, rope=rope, base=base, dim=dim, layered=layer_type is not None))


def max_len(fields: Fields, rope: RopeSpec | None, *, stretched: bool = False) -> int:
    """Return the longest sequence that a config provides for, in tokens.

    That is `max_position_embeddings`, which for kinds `linear` and `dynamic` is the length before it is stretched, and
    for `yarn` may be.

    Args:
        fields: the config.
        rope: the embedding that stretches it, if any.
        stretched: the family's `max_position_embeddings` is the stretched length already.
    """
    length = _max_positions(fields)
    if rope is None or stretched:
        return length
    if rope.kind in ("linear", "dynamic"):
        return min(max(length, int(length * rope.factor)), MAX_LEN)
    if rope.kind == "yarn":
        return min(max(length, int(rope.original_max_len * rope.factor)), MAX_LEN)
    return length


# --- which table, and what all kinds read -----------------------------------------------------------------------------


def _table(fields: Fields) -> Fields:
    scaling = fields.table("rope_scaling")
    return scaling if scaling.values else fields.table("rope_parameters")


def _layer_table(fields: Fields, layer_type: str) -> Fields:
    """Return a layer type's table. Gemma 3's `rope_scaling` is laid over that of the full layers."""
    tables = fields.table("rope_parameters")
    for key, value in tables.values.items():
        # transformers would ignore it, and with it a theta.
        if value is not None and not isinstance(value, Mapping):
            raise tables.wrong(key, f"in the rope table of a layer type ({', '.join(_LAYER_THETAS)})")
    own, scaling = tables.table(layer_type), fields.table("rope_scaling")
    if layer_type != "full_attention" or not scaling.values:
        return own
    if not own.values:
        return scaling
    return Fields({**own.values, **scaling.values}, f"rope_scaling over {own.prefix}")


def _theta(fields: Fields, rope: Fields, layer_type: str | None, default: float) -> float:
    """Return the base: the table's, else the config's; a default only where no theta is given anywhere."""
    name = "rope_theta" if layer_type is None else _LAYER_THETAS[layer_type]
    for where, key in ((rope, "rope_theta"), (fields, name)):
        if where.has(key):
            theta = where.number(key)
            if theta < 1:
                raise where.wrong(key, "a finite number from 1")
            return theta
    other = fields.get("rope_parameters", {})
    if layer_type is None and isinstance(other, Mapping) and other.get("rope_theta") is not None:
        raise CheckpointError(
            f"config: rope_scaling rules out rope_parameters, whose rope_theta {other['rope_theta']!r} would be lost; "
            "give one of the two",
            field="rope_scaling",
        )
    return default


def _rotated(fields: Fields, rope: Fields, head_dim: int, partial: float | None, *, whole_is_known: bool) -> int:
    """Return how many dimensions of a head are rotated."""
    where = rope if rope.has(_PARTIAL) else fields
    factor = where.number(_PARTIAL, 1.0 if partial is None else partial)
    dim = int(head_dim * factor)
    if factor > 1 or dim < 1:
        raise where.wrong(_PARTIAL, f"a number up to 1 that leaves a part of the head's {head_dim} dimensions")
    if partial is not None:
        return dim
    if factor != 1 and not whole_is_known:
        raise where.wrong(_PARTIAL, "1; this family rotates whole heads")
    return head_dim


def _max_positions(fields: Fields) -> int:
    return fields.size("max_position_embeddings", 2048, high=MAX_LEN)


# --- the kinds --------------------------------------------------------------------------------------------------------


@frozen
class _Table:
    """What the reader of a kind reads.

    Attributes:
        config, rope: the whole config, and its rope table.
        layered: the table is one layer type's.
    """

    config: Fields
    rope: Fields
    base: float
    dim: int
    layered: bool

    def spec(
        self, kind: Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"], **facts: Any
    ) -> RopeSpec:
        return RopeSpec(kind=kind, base=self.base, dim=self.dim, **facts)

    def ratio(self, name: str) -> float:
        value = self.rope.number(name)
        if not _LOW <= value <= _HIGH:
            raise self.rope.wrong(name, f"a number from {_LOW:g} to {_HIGH:g}")
        return value

    def optional(self, name: str, default: float) -> float:
        """Return a ratio; transformers takes 0 as not given."""
        value = self.rope.get(name, 0)
        return default if value == 0 and not isinstance(value, bool) else self.ratio(name)

    def ratios(self, name: str) -> tuple[float, ...]:
        """Return a list of ratios, one a pair."""
        values = self.rope.numbers(name, (self.dim + 1) // 2)
        if not _LOW <= min(values) <= max(values) <= _HIGH:
            raise self.rope.wrong(name, f"a list of numbers from {_LOW:g} to {_HIGH:g}")
        return values

    def original(self) -> int:
        """Return the length before it was stretched."""
        return self.place().size(_ORIGINAL, _max_positions(self.config), high=MAX_LEN)

    def place(self) -> Fields:
        """Return where the original length is read: the config's own goes first, but for layer types."""
        return self.config if self.config.has(_ORIGINAL) and not self.layered else self.rope

    def stretch(self) -> float:
        """Return the factor, or by how much the config's length goes beyond the original one."""
        if self.rope.has("factor"):
            return self.ratio("factor")
        if not self.place().has(_ORIGINAL):
            raise self.rope.wrong("factor", f"a number, which could be told by {_ORIGINAL} if that was given")
        return _max_positions(self.config) / self.original()


def _default(table: _Table) -> RopeSpec:
    return table.spec("default")


def _linear(table: _Table) -> RopeSpec:
    return table.spec("linear", factor=table.ratio("factor"))


def _dynamic(table: _Table) -> RopeSpec:
    if table.dim <= 2:
        raise CheckpointError(
            f"config: rope kind 'dynamic' needs more than 2 dimensions that are rotated, not {table.dim}",
            field=f"{table.rope.prefix}rope_type",
        )
    # As in transformers: what is stretched is max_position_embeddings, whatever the original length is said to be.
    return table.spec("dynamic", factor=table.ratio("factor"), original_max_len=_max_positions(table.config))


def _llama3(table: _Table) -> RopeSpec:
    low, high = table.ratio("low_freq_factor"), table.ratio("high_freq_factor")
    if high <= low:
        raise table.rope.wrong("high_freq_factor", f"above low_freq_factor ({low:g})")
    return table.spec(
        "llama3",
        factor=table.ratio("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_len=table.original(),
    )


def _yarn(table: _Table) -> RopeSpec:
    rope, factor = table.rope, table.stretch()
    if table.base == 1 or table.dim % 2:
        raise CheckpointError(
            f"config: rope kind 'yarn' needs a rope_theta above 1 and an even number of dimensions that are rotated, "
            f"not {table.base:g} and {table.dim}",
            field=f"{rope.prefix}rope_type",
        )
    for name in ("short_factor", "long_factor"):
        if rope.has(name):
            raise rope.wrong(name, "part of rope kind 'yarn'; it is longrope's")
    fast, slow = table.optional("beta_fast", 32.0), table.optional("beta_slow", 1.0)
    if fast < slow:
        raise rope.wrong("beta_fast", f"from beta_slow ({slow:g}) up")
    return table.spec(
        "yarn",
        factor=factor,
        original_max_len=table.original(),
        attention_factor=_yarn_attention(table, factor),
        beta_fast=fast,
        beta_slow=slow,
        truncate=rope.flag("truncate", True),
    )


def _yarn_attention(table: _Table, factor: float) -> float:
    """Return 0.1 ln(factor) + 1 (Peng et al. 2023), or DeepSeek's ratio of two such, each with a weight."""
    weights = table.optional("mscale", 0.0), table.optional("mscale_all_dim", 0.0)
    if table.rope.has("attention_factor"):
        return table.ratio("attention_factor")
    upper, lower = (1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0 for weight in weights)
    if all(weights):
        return upper / lower
    return 1.0 if factor <= 1 else 0.1 * math.log(factor) + 1.0


def _longrope(table: _Table) -> RopeSpec:
    original, factor = table.original(), table.stretch()
    if table.rope.has("attention_factor"):
        attention = table.ratio("attention_factor")
    elif factor <= 1:
        attention = 1.0
    elif original > 1:
        attention = math.sqrt(1 + math.log(factor) / math.log(original))
    else:
        raise table.place().wrong(_ORIGINAL, "a whole number from 2")
    return table.spec(
        "longrope",
        factor=factor,
        original_max_len=original,
        attention_factor=attention,
        short_factors=table.ratios("short_factor"),
        long_factors=table.ratios("long_factor"),
    )


_READERS: Final[Mapping[str, Callable[[_Table], RopeSpec]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "su": _longrope,  # its name in the first Phi 3 checkpoints
}
