"""Which weights a quantizer takes: the options that all of them share. Needs no torch."""

from __future__ import annotations

from fnmatch import fnmatchcase

from attrs import frozen

from intarsia.errors import ConfigError
from intarsia.types import EMBED, HEAD, POSITIONS

#: The option that names a calibration, for messages.
CALIBRATION = "quantizer.calibration"


def stays_dense(name: str) -> bool:
    """Whether the weight of this canonical name is never kept in few bits: routers and position embeddings."""
    return name == POSITIONS or name.endswith(".router.weight")


def check_calibration(path: str, needed_by: str, read_for: str) -> None:
    """Check that a calibration is named where a method needs one, and where something reads it.

    Args:
        path: of the calibration; empty where none is named.
        needed_by: the option that needs one, as a config has it; empty where none does.
        read_for: what would read one, and how to ask for it; empty where something does.

    Raises:
        ConfigError: one is missing, or would not be read.
    """
    if needed_by and not path:
        raise ConfigError(
            f"{CALIBRATION}: {needed_by} needs the inputs of each layer; `intarsia calibrate MODEL --out FILE` writes "
            "them, and calibration = 'FILE' names them",
            field=CALIBRATION,
        )
    if path and read_for:
        raise ConfigError(f"{CALIBRATION}: {path!r} is read for {read_for}", field=CALIBRATION)


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
        """Whether the weight of this canonical name is to be quantized."""
        if stays_dense(name):
            return False
        if (name == EMBED and not self.embed) or (name == HEAD and not self.head):
            return False
        if any(fnmatchcase(name, pattern) for pattern in self.exclude):
            return False
        return any(fnmatchcase(name, pattern) for pattern in self.include)
