"""What is measured, and in which sizes: those of the targets, on a GPU; small ones in tests, on any device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from attrs import frozen

from intarsia.types import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, NormSpec, RopeSpec

#: Told each figure as soon as it is known: a part that is stopped keeps those that it had.
Emit: TypeAlias = Callable[[dict[str, Any]], None]


@frozen(kw_only=True)
class Setting:
    """Sizes of the benchmark; the defaults are Llama 3 8B's and the targets'.

    Attributes:
        attention, kernels: keys of the parts under measurement.
        copy_bytes: of the buffer whose copy tells the bandwidth: far beyond the L2 cache.
        matrix: rows and columns of the matrices whose product tells the peak.
        prefill_tokens: of the one row of prefill attention.
        decode_rows, decode_keys: of paged decode attention.
        long_keys: of the one long row.
        tokens: rows of the fused ops.
        batch, context: of the engine's decode beside transformers'.
        steps: decode steps that are timed.
        rounds: of alternating measurements.
    """

    device: str = "cuda"
    dtype: str = "bfloat16"
    attention: str = "flash"
    kernels: str = "cuda"
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    embed_dim: int = 4096
    ffn_dim: int = 14336
    layers: int = 32
    vocab: int = 128256
    page_size: int = 16
    copy_bytes: int = 1 << 30
    matrix: int = 8192
    prefill_tokens: int = 16384
    decode_rows: int = 32
    decode_keys: int = 8192
    long_keys: int = 131072
    tokens: int = 32768
    batch: int = 64
    context: int = 2048
    prompt: int = 128
    steps: int = 32
    rounds: int = 9
    cache_memory: str = "24GiB"

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch has it."""
        found = getattr(torch, self.dtype)
        assert isinstance(found, torch.dtype)
        return found

    @property
    def attention_spec(self) -> AttentionSpec:
        """Its attention; the scale is D ** -0.5."""
        rope = RopeSpec(kind="default", base=500000.0, dim=self.head_dim)
        return AttentionSpec(self.heads, self.kv_heads, self.head_dim, self.head_dim**-0.5, rope)

    def spec(self, max_len: int) -> DecoderSpec:
        """Return a model of one such layer, for parts that are built from a model."""
        layer = LayerSpec(self.attention_spec, MlpSpec(self.ffn_dim, "silu"))
        return DecoderSpec("llama", self.vocab, self.embed_dim, max_len, NormSpec(), tied=False, layers=(layer,))
