"""Rotary position embedding: what each kind of RopeSpec means, in numbers.

Shape legend: D the rotated dimensions, L positions.
"""

from __future__ import annotations

import math

import torch

from intarsia.types import RopeSpec


def inverse_frequencies(rope: RopeSpec) -> torch.Tensor:
    """Return the angle that each pair turns by a position: (D/2,) float32, in radians.

    `default` is base ** (-2i / D) (Su et al. 2021). `linear` divides it by the factor (position interpolation, Chen et
    al. 2023). `llama3` divides only the long wavelengths, leaves the short ones and blends between (Llama 3.1).
    Computed in float32, operation for operation as transformers does, so that logits agree.
    """
    frequencies = 1.0 / (rope.base ** (torch.arange(0, rope.dim, 2, dtype=torch.int64).float() / rope.dim))
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3(frequencies, rope)
    assert rope.kind == "default", rope.kind
    return frequencies


def _llama3(frequencies: torch.Tensor, rope: RopeSpec) -> torch.Tensor:
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


def cos_sin(rope: RopeSpec, max_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosine and sine tables for positions 0 to `max_len` - 1, each (L, D/2) float32."""
    angles = torch.arange(max_len, dtype=torch.float32)[:, None] * inverse_frequencies(rope)
    return angles.cos(), angles.sin()
