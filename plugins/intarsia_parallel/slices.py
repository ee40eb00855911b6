"""Which slice of each tensor a rank holds (Shoeybi et al. 2019, Megatron-LM).

Rows are cut where a block begins (queries, keys and values; gate and up), columns where it ends (out, down): between
the two each rank works on its own heads and features, and the sum over ranks behind is the block's output. With fewer
key-value heads than ranks, neighbours hold the same one. The vocabulary is cut in equal ranges, the last filled up.
"""

from __future__ import annotations

from attrs import evolve

from intarsia.errors import CompositionError
from intarsia.types import EMBED, HEAD, AttentionSpec, DecoderSpec, LayerSpec, MoeSpec, Part, TensorSource


def ranges(total: int, ranks: int, rank: int) -> tuple[int, int]:
    """Return one rank's range of what divides into equal ones."""
    size = total // ranks
    return rank * size, (rank + 1) * size


def kv_heads(attention: AttentionSpec, tp: int, tp_rank: int) -> tuple[int, int]:
    """Return a rank's range of key-value heads: those that its query heads attend to."""
    if attention.num_kv_heads >= tp:
        return ranges(attention.num_kv_heads, tp, tp_rank)
    head = tp_rank * attention.num_kv_heads // tp
    return head, head + 1


def vocabulary(vocab_size: int, tp: int, tp_rank: int) -> Part:
    """Return a rank's rows of the vocabulary: equally many on each, so that the last ranks may have some to fill up."""
    size = -(-vocab_size // tp)
    start, stop = min(tp_rank * size, vocab_size), min((tp_rank + 1) * size, vocab_size)
    return Part(rows=((start, stop),) if start < stop else (), padding=size - (stop - start))


def misfits(spec: DecoderSpec, tp: int) -> str:
    """Return what of a model so many ranks cannot hold in equal slices; empty where they can."""
    for index, layer in enumerate(spec.layers):
        attention, ffn_dim = layer.attention, layer.mlp.ffn_dim
        if attention.num_heads % tp:
            return f"the {attention.num_heads} query heads of layer {index}"
        if attention.num_kv_heads % tp and tp % attention.num_kv_heads:
            return f"the {attention.num_kv_heads} key-value heads of layer {index}, nor is it a multiple of them"
        if ffn_dim % tp:
            return f"the {ffn_dim} features of layer {index}'s feed-forward"
    return ""


def check_divides(spec: DecoderSpec, tp: int) -> None:
    """Check that so many ranks can hold equal slices of each layer.

    Raises:
        CompositionError: they cannot; names what does not divide, and the nearest numbers that do.
    """
    if not (what := misfits(spec, tp)):
        return
    most = max(layer.attention.num_heads for layer in spec.layers)
    working = [ranks for ranks in range(1, most + 1) if not misfits(spec, ranks)]
    near = [max(n for n in working if n < tp), *[n for n in working if n > tp][:1]]
    raise CompositionError(
        f"executor.tp: {tp} does not divide {what}; what would do: executor.tp = {' or '.join(map(str, near))}",
        field="executor.tp",
    )


def local_layer(layer: LayerSpec, tp: int, tp_rank: int) -> LayerSpec:
    """Return what one rank runs of a layer."""
    first, last = kv_heads(layer.attention, tp, tp_rank)
    attention = evolve(layer.attention, num_heads=layer.attention.num_heads // tp, num_kv_heads=last - first)
    return evolve(layer, attention=attention, mlp=evolve(layer.mlp, ffn_dim=layer.mlp.ffn_dim // tp))


def part_of(name: str, source: TensorSource, spec: DecoderSpec, tp: int, tp_rank: int) -> Part | None:
    """Return what one rank holds of a tensor; None is all of it.

    Args:
        name: canonical, as the whole model has it.
        source: of the whole.
        spec: the whole model.
        tp: ranks that hold slices of it.
        tp_rank: which one.
    """
    if tp == 1:
        return None
    if name in (EMBED, HEAD, "head.bias"):
        return vocabulary(spec.vocab_size, tp, tp_rank)
    if not name.startswith("layers."):
        return None
    _, number, rest = name.split(".", 2)
    layer = spec.layers[int(number)]
    matrix, kind = rest.rsplit(".", 1)
    matrix = matrix.rsplit(".", 1)[-1]  # of an expert
    if matrix in ("out", "down"):
        if kind == "bias":  # is added once
            return None if tp_rank == 0 else Part(rows=(), padding=source.whole[0])
        return Part(rows=((0, source.whole[0]),), columns=ranges(source.whole[1], tp, tp_rank))
    if matrix in ("gate_up", "up"):
        return _feed_forward(layer, matrix, tp, tp_rank)
    return _heads(layer.attention, matrix, tp, tp_rank)


def _feed_forward(layer: LayerSpec, matrix: str, tp: int, tp_rank: int) -> Part:
    start, stop = ranges(layer.mlp.ffn_dim, tp, tp_rank)
    if matrix == "up":
        return Part(rows=((start, stop),))
    return Part(rows=((start, stop), (layer.mlp.ffn_dim + start, layer.mlp.ffn_dim + stop)))


def _heads(attention: AttentionSpec, matrix: str, tp: int, tp_rank: int) -> Part | None:
    """Return a rank's rows of the fused projection, or of a norm over all heads."""
    size = attention.head_dim
    queries, keys = ranges(attention.num_heads, tp, tp_rank), kv_heads(attention, tp, tp_rank)
    of_all = attention.qk_norm == "all"
    if matrix == "qkv":
        first_key = attention.num_heads
        first_value = first_key + attention.num_kv_heads
        heads = [(first + start, first + stop) for first, (start, stop) in
                 ((0, queries), (first_key, keys), (first_value, keys))]  # fmt: skip
        return Part(rows=tuple((start * size, stop * size) for start, stop in heads))
    if matrix == "q_norm" and of_all:
        return Part(rows=((queries[0] * size, queries[1] * size),))
    if matrix == "k_norm" and of_all:
        return Part(rows=((keys[0] * size, keys[1] * size),))
    return None


def num_numbers(spec: DecoderSpec, layer: LayerSpec) -> int:
    """Return how many numbers the matrices of a layer hold."""
    attention, mlp, embed = layer.attention, layer.mlp, spec.embed_dim
    heads = (2 * attention.num_heads + 2 * attention.num_kv_heads) * attention.head_dim * embed
    if isinstance(mlp, MoeSpec):
        return heads + mlp.num_experts * (3 * mlp.ffn_dim + 1) * embed
    return heads + (3 if mlp.gated else 2) * mlp.ffn_dim * embed
