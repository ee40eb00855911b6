"""The targets on an H200, and what figures say of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from attrs import frozen

#: What a part tells: `key`, and of `value`, `measured`, `limit`, `unit` and `note` what there is.
Figure: TypeAlias = Mapping[str, Any]


@frozen
class Target:
    """What a figure must reach.

    Attributes:
        key: of the figure.
        part: which measures it.
        what: in words.
        need: the value, as a part of the limit, or as a ratio.
        at_most: whether it must stay below.
        ratio: whether it is shown as a ratio, not in percent.
    """

    key: str
    part: str
    what: str
    need: float
    at_most: bool = False
    ratio: bool = False

    def met(self, value: float) -> bool:
        """Whether a value reaches it."""
        return value <= self.need if self.at_most else value >= self.need

    def shown(self, value: float) -> str:
        """Return a value as the table has it."""
        return f"{value:.2f}x" if self.ratio else f"{100 * value:.1f}%"


TARGETS = (
    Target(
        "prefill_of_peak", "prefill", "prefill attention, head dim 128, causal, 16k tokens: of a matmul's peak", 0.6
    ),
    Target("prefill_vs_sdpa", "prefill", "the same, beside torch's SDPA", 1.0, ratio=True),
    Target("paged_decode_of_copy", "paged_decode", "paged decode attention, 32 rows x 8k: of copy bandwidth", 0.85),
    Target("rms_norm_of_copy", "fused", "RMS norm: of copy bandwidth", 0.85),
    Target("add_rms_norm_of_copy", "fused", "residual add + RMS norm: of copy bandwidth", 0.85),
    Target("silu_mul_of_copy", "fused", "SiLU x up: of copy bandwidth", 0.85),
    Target("gelu_tanh_mul_of_copy", "fused", "GeLU x up: of copy bandwidth", 0.85),
    Target("decode1_of_bandwidth", "llama", "8B bf16 decode, batch 1: of copy bandwidth", 0.8),
    Target(
        "decode64_vs_transformers",
        "transformers",
        "8B bf16 decode, batch 64, 2k context: beside transformers' generate, SDPA, static cache",
        2.0,
        ratio=True,
    ),
    Target("host_share", "llama", "graphs: the host's share of a decode step at batch 64", 0.05, at_most=True),
)


def with_derived(figures: Sequence[Figure]) -> list[Figure]:
    """Return the figures and those that follow from several: the better of our two ways counts."""
    by_key = {figure["key"]: figure for figure in figures}

    def best(key: str, *, least: bool = False) -> Figure | None:
        found = [by_key[name] for name in (key, f"graphs_{key}") if "value" in by_key.get(name, {})]
        return (min if least else max)(found, key=lambda figure: float(figure["value"]), default=None)

    derived: list[Figure] = []
    decode1, share, ours = (
        best("decode1_of_bandwidth"),
        best("decode64_host_share", least=True),
        best("decode64_tokens_per_s"),
    )
    if decode1 is not None:
        derived.append({**decode1, "key": "decode1_of_bandwidth"})
    if share is not None:
        derived.append({**share, "key": "host_share"})
    theirs = by_key.get("transformers_tokens_per_s")
    if ours is not None and theirs is not None:
        pair = {"measured": ours["value"], "limit": theirs["value"], "unit": "tokens/s", "note": theirs.get("note", "")}
        derived.append({"key": "decode64_vs_transformers", "value": ours["value"] / theirs["value"], **pair})
    replaced = {figure["key"] for figure in derived}
    return [figure for figure in figures if figure["key"] not in replaced] + derived
