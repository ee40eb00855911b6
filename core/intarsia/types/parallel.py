"""A model shared out between ranks: what each of them holds, as data. Needs no torch."""

from __future__ import annotations

from attrs import frozen

from intarsia.types.model import DecoderSpec


@frozen(kw_only=True)
class Share:
    """One rank's share of a model: some of its layers, and of each of these a slice.

    Attributes:
        rank: among all, stage after stage: `stage * tp + tp_rank`.
        tp: ranks that hold slices of the same layers (tensor parallelism); `tp_rank` is this one's place among them.
        stages: ranges of layers that run one after another (pipeline parallelism); `stage` is this one's place.
        layers: the whole model's numbers of the layers here.
        spec: what runs here: these layers alone, numbered from 0, with the heads, feed-forward columns and rows of the
            vocabulary that this rank holds.
        vocab_size: of the whole model.
        first_id: token id of the first row of the vocabulary that is here.
    """

    rank: int
    tp_rank: int
    tp: int
    stage: int
    stages: int
    layers: range
    spec: DecoderSpec
    vocab_size: int
    first_id: int

    @property
    def is_first(self) -> bool:
        """Whether its stage embeds the tokens."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether its stage makes the logits."""
        return self.stage == self.stages - 1

    @property
    def chooses(self) -> bool:
        """Whether it is the one rank on which tokens are chosen."""
        return self.is_last and self.tp_rank == 0

    def local_name(self, name: str) -> str:
        """Return what a runner calls a tensor of these layers: the number in `layers.17.qkv.weight` counts from 0."""
        if not name.startswith("layers."):
            return name
        _, number, rest = name.split(".", 2)
        return f"layers.{int(number) - self.layers.start}.{rest}"
