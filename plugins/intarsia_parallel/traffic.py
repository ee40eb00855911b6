"""Traffic between ranks: counted as it happens, and by formula before anything starts.

A payload is the tensor that an op works on, whole. What a rank sends of it, with n ranks in a ring, is

| op | payload | a rank sends |
| --- | --- | --- |
| all-reduce | T x E numbers | 2 (n - 1) / n of it |
| reduce-scatter, all-gather of tokens | T x E numbers, T filled up to a multiple of n | (n - 1) / n of it |
| logits to the first rank | V / n numbers a row, or 16 bytes where the likeliest id is all that is needed | all of it |

A token costs two all-reduces of E numbers a layer (one where attention and feed-forward run side by side) and one for
its embedding; with sequence parallelism each is a reduce-scatter, and as many all-gathers come before the blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attrs import define, field

from intarsia.types import DecoderSpec, Dtype, LayerSpec, MoeSpec, Share

if TYPE_CHECKING:
    import torch

#: Bytes of one number.
_BYTES: Mapping[str, int] = {"float32": 4, "float16": 2, "bfloat16": 2}
#: Bytes that a rank sends for a row of logits whose likeliest id is all that is needed, and bytes of a logit.
PAIR_BYTES, LOGIT_BYTES = 16, 4


@define
class Traffic:
    """Calls and payloads by op.

    Attributes:
        calls: how often.
        payload: bytes.
    """

    calls: dict[str, int] = field(factory=dict, init=False)
    payload: dict[str, int] = field(factory=dict, init=False)

    def count(self, op: str, payload: torch.Tensor) -> None:
        """Count one call."""
        self.calls[op] = self.calls.get(op, 0) + 1
        self.payload[op] = self.payload.get(op, 0) + payload.numel() * payload.element_size()

    def figures(self) -> dict[str, dict[str, int]]:
        """Return calls and payload bytes by op, as plain data."""
        return {op: {"calls": self.calls[op], "bytes": self.payload[op]} for op in self.calls}

    def clear(self) -> None:
        """Begin anew."""
        self.calls.clear()
        self.payload.clear()


def token_payloads(spec: DecoderSpec, share: Share, dtype: Dtype, *, sequence: bool) -> dict[str, int]:
    """Return the payload bytes of one token on one rank's layers, by op, without its logits.

    With sequence parallelism that is of one token among a multiple of n.

    Args:
        spec: the whole model.
        share: of the rank.
        dtype: of activations.
        sequence: whether activations are sharded along tokens.
    """
    if share.tp == 1:
        return {}
    width = spec.embed_dim * _BYTES[dtype]
    layers = [spec.layers[index] for index in share.layers]
    blocks = sum(1 if layer.parallel else 2 for layer in layers)
    sums = (blocks + share.is_first) * width
    found = {"reduce_scatter": sums, "gather_tokens": blocks * width} if sequence else {"all_reduce": sums}
    # One mean of squares each, of queries and of keys, in float32.
    if normed := sum(layer.attention.qk_norm == "all" for layer in layers):
        found["rms_norm_over_ranks"] = 2 * 4 * normed
    return found


def sent(payloads: Mapping[str, int], tp: int) -> int:
    """Return the bytes that a rank sends, in a ring, for payloads by op."""
    twice = sum(size for op, size in payloads.items() if op not in ("reduce_scatter", "gather_tokens"))
    once = sum(payloads.values()) - twice
    return (2 * twice + once) * (tp - 1) // tp


def activation_bytes(spec: DecoderSpec, share: Share, dtype: Dtype, *, sequence: bool) -> int:
    """Return the bytes of activations that a rank holds of one token at most: in the widest layer that it has.

    The residual stream and its norm, of which each rank has 1/n with sequence parallelism; beside them the wider of
    two: queries, keys, values and what attention made of them; or what the feed-forward's two halves are.
    """
    number, ends = _BYTES[dtype], 2 * spec.embed_dim
    if sequence:
        # The gathered norm is whole while a block reads it.
        ends = -(-ends // share.tp) + spec.embed_dim
    return number * (ends + max(_inner(layer) for layer in share.spec.layers))


def _inner(layer: LayerSpec) -> int:
    attention, mlp = layer.attention, layer.mlp
    heads = (2 * attention.num_heads + 2 * attention.num_kv_heads) * attention.head_dim
    gated = isinstance(mlp, MoeSpec) or mlp.gated
    return max(heads, (3 if gated else 2) * mlp.ffn_dim)


def token_report(spec: DecoderSpec, shares: Sequence[Share], dtype: Dtype, *, sequence: bool) -> dict[str, Any]:
    """Return the formulas' figures for `explain`.

    Keys:
        ranks: of each, where it stands, its layers, `activations` (bytes a token) and `sends` (bytes a token, within
            its stage).
        logits: bytes that a rank sends for a row of logits: at most, and where the likeliest id is all.
        stage: bytes that a rank sends a token to the stage behind; 0 where there is one stage.
    """
    width = spec.embed_dim * _BYTES[dtype]
    first = shares[0]
    ranks = []
    for share in shares:
        payloads = token_payloads(spec, share, dtype, sequence=sequence)
        ranks.append(
            {
                "rank": share.rank,
                "stage": share.stage,
                "slice": share.tp_rank,
                "layers": [share.layers.start, share.layers.stop],
                "activations": activation_bytes(spec, share, dtype, sequence=sequence),
                "payloads": payloads,
                "sends": sent(payloads, share.tp),
            }
        )
    logits = {"whole": first.spec.vocab_size * LOGIT_BYTES, "likeliest": PAIR_BYTES} if first.tp > 1 else {}
    stage = 0 if first.stages == 1 else -(-width // first.tp) if sequence else width
    return {"ranks": ranks, "logits": logits, "stage": stage}
