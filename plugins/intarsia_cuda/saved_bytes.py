"""Bytes of memory traffic a token that each fusion saves: what the chain reads and writes, less what the kernel does.

Counted over all layers, for activations of `size` bytes a number, each op of the chain reading its inputs and writing
its outputs once; weights, angles and slots, which are read either way, are left out. What an op keeps in caches between
two kernels is not counted as saved by them: these are bytes that are asked for.

Shape legend: E embed, F ffn, H heads, K kv heads, D head dim.
"""

from __future__ import annotations

from intarsia.types import AttentionSpec, DecoderSpec, LayerSpec, MoeSpec


def _pre_norms(spec: DecoderSpec) -> int:
    """Return how many norms follow a sum with the residual: those before each block but the first."""
    if spec.norm.kind != "rms":
        return 0
    before = sum((1 if layer.parallel else 2) for layer in spec.layers if layer.norms != "post")
    return max(0, before - 1)


def add_rms_norm(spec: DecoderSpec, size: int) -> int:
    """Sum (2 E read, E written) and norm (E, E), against 2 E and 2 E: E a norm."""
    return _pre_norms(spec) * spec.embed_dim * size


def norm_linear(spec: DecoderSpec, size: int) -> int:
    """Normed rows (E written, E read to become int8), against none: 2 E a norm that one linear alone reads.

    What `add_rms_norm` saves of the sum before is saved as well, and counted there.
    """
    if spec.norm.kind != "rms":
        return 0
    before = [layer for layer in spec.layers if layer.norms != "post" and not layer.parallel]
    return sum(1 if isinstance(layer.mlp, MoeSpec) else 2 for layer in before) * 2 * spec.embed_dim * size


def gated(activation: str, spec: DecoderSpec, size: int) -> int:
    """Activation (F read, F written) and product (2 F, F), against 2 F and F: 2 F a block that is gated by it."""
    return sum(2 * _gated_dim(layer) for layer in spec.layers if layer.mlp.activation == activation) * size


def _gated_dim(layer: LayerSpec) -> int:
    if isinstance(layer.mlp, MoeSpec):
        return layer.mlp.top_k * layer.mlp.ffn_dim
    return layer.mlp.ffn_dim if layer.mlp.gated else 0


def attention_inputs(spec: DecoderSpec, size: int) -> int:
    """Return what norms, their joining, rotation and cache write take, less one reading and writing of all heads."""
    return sum(_inputs(layer.attention) for layer in spec.layers) * size


def _inputs(attention: AttentionSpec) -> int:
    """Count numbers. The chain: norms read and write (H + K) D, as joining does; so does rotation; the write 2 K D."""
    if attention.qk_norm == "all" or (attention.qk_norm is None and attention.rope is None):
        return 0  # the chain runs
    turned = (attention.num_heads + attention.num_kv_heads) * attention.head_dim
    stored = 2 * attention.num_kv_heads * attention.head_dim
    queries = attention.num_heads * attention.head_dim
    chain = 2 * stored  # read and written
    chain += 4 * turned if attention.qk_norm is not None else 0
    chain += 2 * turned if attention.rope is not None else 0
    return chain - 2 * (queries + stored)
