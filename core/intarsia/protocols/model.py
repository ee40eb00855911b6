"""What opens model files, and what weights and ops are made by."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from attrs import Factory, frozen

from intarsia.types import Checkpoint, DecoderSpec, Invariance, Weight, WeightMap


class Loader(Protocol):
    """Opens model files of one format."""

    def open(self) -> Checkpoint:
        """Read headers, not weights. Raise CheckpointError where the files are malformed or unsafe."""
        ...


class ModelFamily(Protocol):
    """Turns a checkpoint's config into a DecoderSpec."""

    def spec(self, config: Mapping[str, Any], tensor_names: frozenset[str]) -> DecoderSpec:
        """Return the model; raise CheckpointError for a value that this family does not know."""
        ...

    def weight_map(self, spec: DecoderSpec, tensor_names: frozenset[str]) -> WeightMap:
        """Return which checkpoint tensors make the model's. One family's checkpoints can differ in their names."""
        ...


class Quantizer(Protocol):
    """Turns dense weights into another format while the model loads."""

    @property
    def format(self) -> str:
        """Name of the weight format that comes out."""
        ...

    def accepts(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether it takes the weight of this canonical name; the others stay as they are."""
        ...

    def num_bytes(self, name: str, shape: tuple[int, ...]) -> int:
        """Bytes that the weight of this name and shape takes in this format."""
        ...

    def quantize(self, name: str, weight: Weight) -> Weight:
        """Return the weight in this format. Raise CheckpointError that names it where it cannot be represented."""
        ...


@frozen(kw_only=True)
class Kernel:
    """One implementation of a named op.

    Attributes:
        op: its name in `intarsia.ops.OPS`, or in `FUSED` there where it stands for a chain of ops.
        call: has the signature of the op's reference, and equals it up to rounding.
        formats: weight formats it reads, for ops on weights; for `cache_write` the entry formats that it converts to,
            besides the dtype of what it is given; empty elsewhere.
        orders: cache axis orders it reads, for ops on the cache; empty elsewhere.
        dtypes: activation dtypes, by name; empty is all.
        invariance: what it promises of a row's result when the batch around the row changes, by dtype name.
        pack: for `linear`: turns a weight of its formats into what `call` reads best, once, while weights load. `call`
            still reads weights that are not packed.
        packed: name of the weight format that `pack` makes.
        dequantizes: whether `call` makes floats of the weight each time, so that few bits save memory and no time.
        saves: of one that does in a pass over memory what takes several: how many bytes of memory traffic a token that
            saves over a whole model, given its spec and the bytes of an activation. `explain` shows it.
    """

    op: str
    call: Callable[..., Any]
    formats: frozenset[str] = frozenset()
    orders: frozenset[str] = frozenset()
    dtypes: frozenset[str] = frozenset()
    invariance: Mapping[str, Invariance] = Factory(dict)
    pack: Callable[[Weight], Weight] | None = None
    packed: str = ""
    dequantizes: bool = False
    saves: Callable[[DecoderSpec, int], int] | None = None


class Kernels(Protocol):
    """A set of kernels. Composition takes, for each op, the first in the config's order that fits."""

    def kernels(self) -> Sequence[Kernel]:
        """Return what it implements on this device."""
        ...


@runtime_checkable
class Divisible(Protocol):
    """What a weight format or a quantizer can say besides: where ranks may cut its weights."""

    @property
    def column_step(self) -> int:
        """How many columns stay together: a weight is cut at multiples of it alone."""
        ...
