"""A model as data: what it is (`DecoderSpec`), its weights (`Weight`), and a checkpoint that can give both.

Families are specs, so that a fused runner can read a model as well as the eager one can run it.
Shape legend: E embed, H heads, K kv heads, D head dim, F ffn, V vocab, N out features, C in features.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol

from attrs import Factory, field, frozen

if TYPE_CHECKING:
    import torch


@frozen(cache_hash=True)  # every layer of every step looks its angles up by it
class RopeSpec:
    """Rotary position embedding over the first `dim` of the head's dimensions (Su et al. 2021, RoFormer).

    Pairs are (i, i + dim/2), as in Hugging Face checkpoints. `inverse_frequencies()` says what each kind means.
    """

    kind: Literal["default", "linear", "llama3"]
    base: float
    dim: int
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_len: int = 0


@frozen
class AttentionSpec:
    """Softmax attention of H query heads over K key-value heads: MHA is K == H, GQA 1 < K < H, MQA K == 1.

    Attributes:
        scale: multiplies the scores, usually D ** -0.5.
        window: a query sees the last `window` keys, itself included; None is all of them.
        soft_cap: scores become `soft_cap * tanh(scores / soft_cap)`; None leaves them.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: RopeSpec | None
    qkv_bias: bool = False
    out_bias: bool = False
    window: int | None = None
    soft_cap: float | None = None


@frozen
class MlpSpec:
    """A gated feed-forward block: `down(activation(gate(x)) * up(x))` (Shazeer 2020, GLU Variants)."""

    ffn_dim: int
    activation: Literal["silu"]
    bias: bool = False


@frozen
class LayerSpec:
    """One decoder layer: attention and feed-forward, each behind an RMS norm and added to the residual."""

    attention: AttentionSpec
    mlp: MlpSpec


@frozen
class DecoderSpec:
    """A decoder-only transformer, complete enough to run from.

    Attributes:
        family: key of the family that made it.
        max_len: the longest sequence it was trained for, in tokens.
        tied: the head shares the embedding's weight.
    """

    family: str
    vocab_size: int
    embed_dim: int
    max_len: int
    norm_eps: float
    tied: bool
    layers: tuple[LayerSpec, ...]

    @property
    def num_layers(self) -> int:
        """How many layers."""
        return len(self.layers)


class WeightFormat(Protocol):
    """How a weight's numbers are stored: a documented layout of named tensors. Kernels declare which they read."""

    @property
    def name(self) -> str:
        """The format's key, such as `dense` or `int8`."""
        ...

    def dequantize(self, weight: Weight) -> torch.Tensor:
        """Return the weight as an (N, C) floating tensor."""
        ...

    def shard(self, weight: Weight, dim: int, start: int, stop: int) -> Weight:
        """Return rows (dim 0) or columns (dim 1) `start` to `stop`; raise CompositionError where a group is cut."""
        ...


@frozen(eq=False)
class Weight:
    """A matrix of a linear layer: where loader, quantizer, kernel and tensor parallelism meet."""

    format: WeightFormat
    tensors: Mapping[str, torch.Tensor]
    shape: tuple[int, ...]

    def dequantize(self) -> torch.Tensor:
        """Return the (N, C) floating tensor that this weight stands for."""
        return self.format.dequantize(self)

    def shard(self, dim: int, start: int, stop: int) -> Weight:
        """Return the part from `start` to `stop` along `dim`."""
        return self.format.shard(self, dim, start, stop)

    @property
    def num_bytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


@frozen
class _Dense:
    name: str = "dense"

    def dequantize(self, weight: Weight) -> torch.Tensor:
        return weight.tensors["weight"]

    def shard(self, weight: Weight, dim: int, start: int, stop: int) -> Weight:
        part = weight.tensors["weight"].narrow(dim, start, stop - start)
        return dense(part)


#: One floating tensor `weight` of shape (N, C), as it is.
DENSE: WeightFormat = _Dense()


def dense(tensor: torch.Tensor) -> Weight:
    """Wrap a floating (N, C) tensor as a weight."""
    return Weight(DENSE, {"weight": tensor}, tuple(tensor.shape))


class StoredTensor(Protocol):
    """A tensor in a checkpoint file: its facts are known, its bytes are read when asked for."""

    @property
    def name(self) -> str:
        """Its name in Hugging Face's spelling."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Its logical shape, rows first."""
        ...

    @property
    def format(self) -> str:
        """How the file stores it: `F32`, `BF16`, `Q4_1`, ..."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        ...

    def read(self, out: torch.Tensor) -> None:
        """Write the values into `out`, a tensor of its shape and any float dtype, in bounded extra memory."""
        ...


@frozen
class TensorSource:
    """Where one tensor of the model comes from: the checkpoint tensors that are laid end to end along dim 0."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole."""
        return (sum(shape[0] for shape in self.shapes), *self.shapes[0][1:])


@frozen
class WeightMap:
    """Which checkpoint tensors make the model's, and which may be there unread.

    Attributes:
        tensors: canonical name -> source, in the order they are loaded. The names are listed in `models/weights.py`.
        ignored: glob patterns of checkpoint tensors that a family knows and does not need.
    """

    tensors: Mapping[str, TensorSource]
    ignored: tuple[str, ...] = ()

    def ignores(self, name: str) -> bool:
        """Whether a checkpoint tensor of this name may stay unread."""
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.ignored)


@frozen
class TokenizerSpec:
    """A tokenizer as data.

    Attributes:
        definition: the content of a Hugging Face `tokenizer.json`.
        bos_id: id put before a plain prompt if `add_bos`.
        eos_ids: ids that end a generation.
        chat_template: Jinja source, or None where the model has none.
        special_tokens: names that templates use (`bos_token`, `eos_token`, ...) -> text.
    """

    definition: str = field(repr=False)
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    add_bos: bool = False
    chat_template: str | None = field(default=None, repr=False)
    special_tokens: Mapping[str, str] = Factory(dict)


class Checkpoint(Protocol):
    """Model files, opened: facts at once, tensors on demand. Tensor and config names are Hugging Face's spelling."""

    @property
    def config(self) -> Mapping[str, Any]:
        """The model's config as Hugging Face's config.json would have it; holds at least `model_type`."""
        ...

    @property
    def dtype(self) -> str:
        """The widest floating dtype its tensors are stored in (`float32`, `bfloat16`, ...), for reports."""
        ...

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """Every tensor in the files."""
        ...

    def tokenizer(self) -> TokenizerSpec | None:
        """The tokenizer, or None where the files have none; raise CheckpointError where it is malformed."""
        ...
