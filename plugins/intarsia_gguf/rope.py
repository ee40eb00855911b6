"""Rotary embedding in Hugging Face's spelling (`rope_parameters` of transformers 5) from GGUF's.

llama.cpp has two places: `{arch}.rope.scaling.*` for linear and yarn, and tensors of one number a pair of dimensions,
which divide the frequencies. `rope_freqs.weight` is llama3's: its converter computes it from llama3's parameters; here
they are found again and taken only if they give exactly that tensor. `rope_factors_long.weight` and
`rope_factors_short.weight` are longrope's.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from attrs import frozen

from intarsia.errors import CheckpointError
from intarsia_gguf.header import Header
from intarsia_gguf.metadata import Metadata

DIVISORS, LONG, SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
_MAX_NUMBERS = 1 << 16
_TOLERANCE = 1e-5
#: What Llama 3.1, 3.2 and 3.3 were trained with; tried first because the tensor fixes only the ratios.
_LOW, _HIGH, _ORIGINAL = 1.0, 4.0, 8192
_SCALING_KEYS = frozenset(
    {"type", "factor", "original_context_length", "finetuned", "yarn_beta_fast", "yarn_beta_slow"}
)
#: What longrope has of them: a factor would change its frequencies in llama.cpp.
_LONGROPE_KEYS = frozenset({"type", "original_context_length", "finetuned", "attn_factor"})


@frozen
class RopeTensors:
    """The tensors that divide the frequencies, float64, one number a pair of dimensions; None where there is none."""

    divisors: np.ndarray | None = None
    long: np.ndarray | None = None
    short: np.ndarray | None = None


def read_rope_tensors(header: Header) -> RopeTensors:
    """Read them; raise CheckpointError for one that is no vector of float32."""
    return RopeTensors(*(_vector(header, name) for name in (DIVISORS, LONG, SHORT)))


def _vector(header: Header, name: str) -> np.ndarray | None:
    found = next((info for info in header.tensors if info.name == name), None)
    if found is None:
        return None
    if found.format.name != "F32" or len(found.shape) != 1 or found.shape[0] > _MAX_NUMBERS:
        raise CheckpointError(
            f"{header.path}: tensor {name!r} is {found.format.name} of the shape {found.shape}, "
            "not F32 of half the dimensions that are rotated"
        )
    raw = header.data[found.offset : found.offset + found.num_bytes]
    return np.frombuffer(raw, dtype="<f4").astype(np.float64)


@frozen
class Llama3Rope:
    """llama3's frequency scaling (Dubey et al. 2024): long wavelengths are stretched, short ones are not."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_len: int

    def divisors(self, base: float, dim: int) -> np.ndarray:
        """Return what divides each of the dim / 2 frequencies, as transformers' `_compute_llama3_parameters` does."""
        wavelengths = _wavelengths(base, dim)
        span = self.high_freq_factor - self.low_freq_factor
        smooth = (self.original_max_len / wavelengths - self.low_freq_factor) / span
        divisors = 1 / ((1 - smooth) / self.factor + smooth)
        divisors = np.where(wavelengths > self.original_max_len / self.low_freq_factor, self.factor, divisors)
        return np.where(wavelengths < self.original_max_len / self.high_freq_factor, 1.0, divisors)


def rope_parameters(metadata: Metadata, prefix: str, dim: int, tensors: RopeTensors) -> dict[str, Any]:
    """Return `rope_parameters` of a model.

    Args:
        metadata: the file's.
        prefix: the architecture's, with which the keys begin.
        dim: how many dimensions of a head are rotated.
        tensors: the file's.

    Raises:
        CheckpointError: the file asks for a scaling that transformers cannot express, or that is not known here.
    """
    base = metadata.number(f"{prefix}.rope.freq_base", positive=True, default=10000.0)
    divisors = tensors.divisors
    if tensors.long is not None or tensors.short is not None:
        if divisors is not None:
            raise CheckpointError(f"{metadata.path}: tensor {DIVISORS!r} is there beside longrope's; only one can hold")
        return {"rope_theta": base, **_longrope(metadata, prefix, dim, tensors)}
    scaling = _scaling(metadata, prefix)
    if divisors is None or np.all(divisors == 1):
        return {"rope_theta": base, **scaling}
    if scaling["rope_type"] != "default":
        metadata.fail(f"{prefix}.rope.scaling.type", f"is given beside the tensor {DIVISORS!r}; only one can hold")
    found = _find_llama3(metadata, base, dim, divisors)
    return {
        "rope_theta": base,
        "rope_type": "llama3",
        "factor": found.factor,
        "low_freq_factor": found.low_freq_factor,
        "high_freq_factor": found.high_freq_factor,
        "original_max_position_embeddings": found.original_max_len,
    }


def _longrope(metadata: Metadata, prefix: str, dim: int, tensors: RopeTensors) -> dict[str, Any]:
    start = f"{prefix}.rope.scaling."
    _check_keys(metadata, start, _LONGROPE_KEYS)
    # Phi-3's converter writes no type.
    kind = metadata.text(f"{start}type", default="longrope")
    if kind not in ("longrope", "none"):
        metadata.fail(f"{start}type", f"is {kind[:100]!r} beside longrope's tensors; only one can hold")
    factors = {}
    for name, factor, short in ((LONG, tensors.long, "long_factor"), (SHORT, tensors.short, "short_factor")):
        if factor is None or factor.shape != (dim // 2,):
            found = "is missing" if factor is None else f"has the shape {factor.shape}"
            raise CheckpointError(f"{metadata.path}: tensor {name!r} {found}; longrope needs ({dim // 2},)")
        factors[short] = factor.tolist()
    return {
        "rope_type": "longrope",
        **factors,
        "original_max_position_embeddings": metadata.integer(f"{start}original_context_length"),
        "attention_factor": metadata.number(f"{start}attn_factor", positive=True),
    }


def _check_keys(metadata: Metadata, start: str, known: frozenset[str]) -> None:
    for key in metadata.values:
        if key.startswith(start) and key.removeprefix(start) not in known:
            metadata.fail(key, "is not supported: this way of scaling rotary embeddings is not known")


def _scaling(metadata: Metadata, prefix: str) -> dict[str, Any]:
    start = f"{prefix}.rope.scaling."
    _check_keys(metadata, start, _SCALING_KEYS)
    # `rope.scale_linear` is how files of 2023 spell it.
    legacy = metadata.number(f"{prefix}.rope.scale_linear", positive=True, default=1.0)
    # llama.cpp takes a factor without a type as linear.
    kind = metadata.text(f"{start}type", default="linear")
    factor = metadata.number(f"{start}factor", default=legacy)
    if kind in ("none", "") or (kind == "linear" and factor in (0, 1)):
        return {"rope_type": "default"}
    if factor < 1:
        metadata.fail(f"{start}factor", f"is {factor}, not a number from 1")
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        metadata.fail(f"{start}type", f"is {kind[:100]!r}, which is not supported; none, linear and yarn are")
    parameters = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": metadata.integer(f"{start}original_context_length"),
    }
    for name in ("beta_fast", "beta_slow"):
        if f"{start}yarn_{name}" in metadata:
            parameters[name] = metadata.number(f"{start}yarn_{name}", positive=True)
    return parameters


def _find_llama3(metadata: Metadata, base: float, dim: int, divisors: np.ndarray) -> Llama3Rope:
    """Return the parameters whose divisors are these."""
    if divisors.shape != (dim // 2,):
        raise CheckpointError(
            f"{metadata.path}: tensor {DIVISORS!r} has the shape {divisors.shape}, not ({dim // 2},), half a head"
        )
    factor = float(divisors.max()) if np.isfinite(divisors).all() else math.nan
    if factor > 1 and divisors.min() >= 1 - _TOLERANCE:
        for candidate in (Llama3Rope(factor, _LOW, _HIGH, _ORIGINAL), _solve(base, dim, divisors, factor)):
            if candidate is not None and np.allclose(candidate.divisors(base, dim), divisors, rtol=_TOLERANCE, atol=0):
                return candidate
    raise CheckpointError(
        f"{metadata.path}: tensor {DIVISORS!r} divides the rotary frequencies in a way that is not llama3's, "
        "the only one that is supported"
    )


def _solve(base: float, dim: int, divisors: np.ndarray, factor: float) -> Llama3Rope | None:
    """Solve the smooth part for its two unknowns, with low_freq_factor as 1: the tensor fixes only ratios to it.

    Between the thresholds smooth = original / (wavelength * (high - 1)) - 1 / (high - 1), a line in 1 / wavelength.
    """
    between = (divisors > 1 + 1e-3) & (divisors < factor * (1 - 1e-3))
    if between.sum() < 2:
        return None
    smooth = (1 / divisors[between] - 1 / factor) / (1 - 1 / factor)
    slope, offset = np.polyfit(1 / _wavelengths(base, dim)[between], smooth, 1)
    if not offset < 0 < slope:
        return None
    high = 1 - 1 / offset
    original = slope * (high - 1)
    if not 1 <= original < 2**31:
        return None
    rounded = round(high, 3)
    return Llama3Rope(factor, 1.0, float(rounded if abs(rounded - high) < 1e-2 else high), round(original))


def _wavelengths(base: float, dim: int) -> np.ndarray:
    """Return the dim / 2 wavelengths in tokens."""
    wavelengths: np.ndarray = 2 * math.pi * base ** (np.arange(0, dim, 2, dtype=np.float64) / dim)
    return wavelengths
