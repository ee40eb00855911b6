"""Reading rotary embeddings: `rope_scaling` (transformers 4) or `rope_parameters` (5), whole or per layer type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from intarsia.errors import CheckpointError
from intarsia.families.fields import MAX_LEN, Fields
from intarsia.types import RopeSpec

_KINDS = ("default", "linear", "llama3")
#: transformers' default, taken only where a config gives no theta at all.
_DEFAULT_THETA = 10_000.0


def read_rope(fields: Fields, head_dim: int) -> RopeSpec:
    """Return the rotary embedding that a config describes, with the precedence of transformers 5.

    Args:
        fields: the config.
        head_dim: dimensions of a head.

    Raises:
        CheckpointError: a value is missing, malformed or of a kind that is not known; names it.
    """
    name, table = _rope_table(fields)
    rope = Fields(table, prefix=f"{name}.")
    for where in (fields, rope):
        if where.get("partial_rotary_factor", 1) != 1:
            raise where.wrong("partial_rotary_factor", "1; llama rotates whole heads")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in _KINDS:
        spelling = "rope_type" if table.get("rope_type") is not None else "type"
        raise rope.wrong(spelling, f"one of the rope kinds that are known: {', '.join(_KINDS)}")
    if kind == "default":
        unread = [key for key, value in table.items() if isinstance(value, dict)]
        if unread or ("factor" in table and "rope_type" not in table and "type" not in table):
            key = unread[0] if unread else "factor"
            raise rope.wrong(key, "part of rope kind 'default'; rope_type must name the kind, one for all layers")
    base = _theta(fields, rope)
    if kind == "default":
        return RopeSpec(kind="default", base=base, dim=head_dim)
    factor = rope.number("factor")
    if kind == "linear":
        return RopeSpec(kind="linear", base=base, dim=head_dim, factor=factor)
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if high <= low:
        raise rope.wrong("high_freq_factor", f"above low_freq_factor ({low:g})")
    original = "original_max_position_embeddings"
    source = fields if fields.has(original) else rope
    return RopeSpec(
        kind="llama3",
        base=base,
        dim=head_dim,
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_len=source.size(original, fields.size("max_position_embeddings", 2048, high=MAX_LEN)),
    )


def _rope_table(fields: Fields) -> tuple[str, Mapping[str, Any]]:
    for name in ("rope_scaling", "rope_parameters"):
        table = fields.get(name, {})
        if not isinstance(table, dict):
            raise fields.wrong(name, "an object or null")
        if table:
            return name, table
    return "rope_parameters", {}


def _theta(fields: Fields, rope: Fields) -> float:
    """Return the base: the table's, else the config's; a default only where no theta is given anywhere."""
    if rope.has("rope_theta"):
        return rope.number("rope_theta")
    if fields.has("rope_theta"):
        return fields.number("rope_theta")
    other = fields.get("rope_parameters", {})
    if isinstance(other, dict) and other.get("rope_theta") is not None:
        raise CheckpointError(
            f"config: rope_scaling rules out rope_parameters, whose rope_theta {other['rope_theta']!r} would be lost; "
            "give one of the two",
            field="rope_scaling",
        )
    return _DEFAULT_THETA


def max_len(fields: Fields, rope: RopeSpec | None) -> int:
    """Return the longest sequence that a config provides for: what it says, stretched where the rotary kind does."""
    del rope
    return fields.size("max_position_embeddings", 2048, high=MAX_LEN)
