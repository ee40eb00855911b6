"""Rotary position embedding: what each kind of RopeSpec means, in numbers.

Computed in float32, operation for operation as transformers does (`modeling_rope_utils.py`), so that logits agree.

Two kinds depend on how long a sequence is: `dynamic` and `longrope`. They are taken for a sequence of `max_len`, the
engine's `max_model_len`, whatever a sequence's own length: a token's angles must not change while its sequence grows,
or chunks, cached prefixes and preemption would show in the result. For a sequence of that length they equal
transformers'; to have a model's short form, set `max_model_len` to its original length.

Shape legend: D the rotated dimensions, L positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch

from intarsia.types import RopeSpec


def cos_sin(rope: RopeSpec, max_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosine and sine tables for positions 0 to `max_len` - 1, each (L, D/2) float32.

    Both are multiplied by the attention factor, which YaRN and LongRoPE thus put on the scores twice.
    """
    angles = torch.arange(max_len, dtype=torch.float32)[:, None] * inverse_frequencies(rope, max_len)
    return angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor


def inverse_frequencies(rope: RopeSpec, max_len: int) -> torch.Tensor:
    """Return the angle that each pair turns by a position: (D/2,) float32, in radians.

    Args:
        rope: the embedding. An odd D has a last pair too: there are D/2 of them, rounded up.
        max_len: the length of the sequences that `dynamic` and `longrope` are taken for, in tokens.
    """
    assert rope.kind in _KINDS, rope.kind
    return _KINDS[rope.kind](rope, max_len)


def _powers(rope: RopeSpec, base: float) -> torch.Tensor:
    """Return base ** (2i / D), (D/2,): how many positions each pair takes to turn by a radian."""
    powers: torch.Tensor = base ** (torch.arange(0, rope.dim, 2, dtype=torch.int64).float() / rope.dim)
    return powers


def _default(rope: RopeSpec, _: int) -> torch.Tensor:
    """Return base ** (-2i / D) (Su et al. 2021)."""
    return 1.0 / _powers(rope, rope.base)


def _linear(rope: RopeSpec, max_len: int) -> torch.Tensor:
    """Divide all by the factor: position interpolation (Chen et al. 2023)."""
    return _default(rope, max_len) / rope.factor


def _dynamic(rope: RopeSpec, max_len: int) -> torch.Tensor:
    """Let the base grow with the length, beyond the original one: dynamic NTK scaling (bloc97 and emozilla 2023)."""
    length = max(max_len, rope.original_max_len)
    stretch = (rope.factor * length / rope.original_max_len) - (rope.factor - 1)
    return 1.0 / _powers(rope, rope.base * stretch ** (rope.dim / (rope.dim - 2)))


def _llama3(rope: RopeSpec, max_len: int) -> torch.Tensor:
    """Divide the long wavelengths, leave the short ones and blend between (Llama 3.1, Dubey et al. 2024)."""
    frequencies = _default(rope, max_len)
    longest = rope.original_max_len / rope.low_freq_factor
    shortest = rope.original_max_len / rope.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    scaled = torch.where(wavelengths > longest, frequencies / rope.factor, frequencies)
    smooth = (rope.original_max_len / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - smooth) * scaled / rope.factor + smooth * scaled
    between = ~(wavelengths < shortest) * ~(wavelengths > longest)
    return torch.where(between, blended, scaled)


def _yarn(rope: RopeSpec, _: int) -> torch.Tensor:
    """Leave the fast pairs, divide the slow ones, with a ramp between (Peng et al. 2023, YaRN)."""
    powers = _powers(rope, rope.base)
    low, high = _turning_pair(rope, rope.beta_fast), _turning_pair(rope, rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    if low == high:
        high += 0.001  # no division by zero
    ramp = torch.clamp((torch.arange(rope.dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    kept = 1 - ramp
    return 1.0 / (rope.factor * powers) * (1 - kept) + 1.0 / powers * kept


def _turning_pair(rope: RopeSpec, turns: float) -> float:
    """Return which pair turns so often within the original length; a fraction."""
    return (rope.dim * math.log(rope.original_max_len / (turns * 2 * math.pi))) / (2 * math.log(rope.base))


def _longrope(rope: RopeSpec, max_len: int) -> torch.Tensor:
    """Divide each pair by a number of its own, one set within the original length and one beyond (Ding et al. 2024)."""
    factors = rope.long_factors if max_len > rope.original_max_len else rope.short_factors
    return 1.0 / (torch.tensor(factors, dtype=torch.float32) * _powers(rope, rope.base))


_KINDS: Mapping[str, Callable[[RopeSpec, int], torch.Tensor]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
