"""Which weights a quantizer takes: the options that all of them share. Needs no torch."""

from __future__ import annotations

from fnmatch import fnmatchcase

from attrs import frozen

EMBED, POSITIONS, HEAD = "embed.weight", "positions.weight", "head.weight"


@frozen(kw_only=True)
class QuantizerOptions:
    """Options that every quantizer has; its own options class inherits them.

    Names are canonical: `layers.0.qkv.weight`, `layers.0.out.weight`, `.gate_up`, `.down`, `head.weight`.
    """

    #: names of weights that may be quantized, as patterns: `["layers.*"]`, `["*.down.weight"]`
    include: tuple[str, ...] = ("*",)
    #: names of weights that stay as they are, as patterns: `["layers.0.*", "head.weight"]`
    exclude: tuple[str, ...] = ()
    #: quantize the head; one that is tied to the embedding gets a weight of its own
    head: bool = True
    #: quantize the embedding too, and with it a head that is tied to it
    embed: bool = False

    def takes(self, name: str) -> bool:
        """Whether the weight of this canonical name is to be quantized. Routers and position embeddings never are."""
        if name == POSITIONS or name.endswith(".router.weight"):
            return False
        if (name == EMBED and not self.embed) or (name == HEAD and not self.head):
            return False
        if any(fnmatchcase(name, pattern) for pattern in self.exclude):
            return False
        return any(fnmatchcase(name, pattern) for pattern in self.include)
