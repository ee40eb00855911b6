"""A model as data: what it is (`DecoderSpec`), its weights (`Weight`), and a checkpoint that can give both.

Families are specs, so that a fused runner can read a model as well as the eager one can run it.
Shape legend: E embed, H heads, K kv heads, D head dim, F ffn, V vocab, N out features, C in features.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, runtime_checkable

from attrs import Factory, field, frozen

if TYPE_CHECKING:
    import torch


#: What an activation is called in a config's `hidden_act` is a family's business; these are what it means.
Activation: TypeAlias = Literal["silu", "gelu_tanh"]


#: Canonical names of weights that are treated apart; `intarsia.models.weights` lists all.
EMBED, POSITIONS, HEAD = "embed.weight", "positions.weight", "head.weight"


@frozen(cache_hash=True)  # every layer of every step looks its angles up by it
class RopeSpec:
    """Rotary position embedding over the first `dim` of the head's dimensions (Su et al. 2021, RoFormer).

    Pairs are (i, i + dim/2), as in Hugging Face checkpoints. `intarsia.rope` says what each kind means, and
    which fields it reads.

    Attributes:
        factor: how many times longer than `original_max_len` sequences may get, for kinds that stretch.
        attention_factor: multiplies cosine and sine (YaRN and LongRoPE).
        short_factors, long_factors: LongRoPE's divisors, one a pair, for sequences up to `original_max_len` and beyond.
    """

    kind: Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]
    base: float
    dim: int
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_len: int = 0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()


@frozen
class NormSpec:
    """The normalization of a model: all of its norms are alike.

    Attributes:
        kind: `rms` divides by the root mean square (Zhang and Sennrich 2019); `layer` takes the mean off first (Ba et
            al. 2016).
        eps: added to the mean of squares, or to the variance.
        bias: whether each norm adds a vector.
    """

    kind: Literal["rms", "layer"] = "rms"
    eps: float = 1e-6
    bias: bool = False


@frozen
class AttentionSpec:
    """Softmax attention of H query heads over K key-value heads: MHA is K == H, GQA 1 < K < H, MQA K == 1.

    Attributes:
        scale: multiplies the scores, usually D ** -0.5.
        window: a query sees the last `window` keys, itself included; None is all of them.
        soft_cap: scores become `soft_cap * tanh(scores / soft_cap)`; None leaves them.
        qk_norm: queries and keys go through an RMS norm of their own before they are rotated: over each head's
            dimensions (`head`), or over those of all heads together (`all`).
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
    qk_norm: Literal["head", "all"] | None = None


@frozen
class MlpSpec:
    """A feed-forward block.

    Attributes:
        gated: `down(activation(gate(x)) * up(x))` (Shazeer 2020, GLU Variants); otherwise `down(activation(up(x)))`.
        bias: whether every matrix has one.
    """

    ffn_dim: int
    activation: Activation
    bias: bool = False
    gated: bool = True


@frozen
class MoeSpec:
    """A sparse mixture of gated feed-forward blocks (Shazeer et al. 2017): each token goes to a few of them.

    Attributes:
        num_experts: how many there are.
        top_k: how many a token goes to: those that its router finds likeliest.
        ffn_dim: of one expert.
        normalized: whether the weights of the chosen ones are scaled to sum to 1.
    """

    num_experts: int
    top_k: int
    ffn_dim: int
    activation: Activation
    normalized: bool = True


@frozen
class LayerSpec:
    """One decoder layer: attention and feed-forward, each added to the residual.

    Attributes:
        norms: where they stand: `pre` on what a block reads, `post` on what it gives, `both` on the two.
        parallel: the feed-forward reads what attention reads, behind one norm, and both are added at once.
        residual_scale: multiplies what each block adds.
    """

    attention: AttentionSpec
    mlp: MlpSpec | MoeSpec
    norms: Literal["pre", "post", "both"] = "pre"
    parallel: bool = False
    residual_scale: float = 1.0


@frozen
class DecoderSpec:
    """A decoder-only transformer, complete enough to run from.

    Attributes:
        family: key of the family that made it.
        max_len: the longest sequence that its config provides for, in tokens.
        tied: the head shares the embedding's weight.
        num_positions: rows of a learned position embedding, which is added to the tokens'; 0 is none.
        embedding_scale: multiplies the embeddings, rounded to their dtype.
        head_bias: whether the head adds a vector.
        logit_scale: multiplies the logits.
        logit_soft_cap: logits become `cap * tanh(logits / cap)`, after the scale; None leaves them.
    """

    family: str
    vocab_size: int
    embed_dim: int
    max_len: int
    norm: NormSpec
    tied: bool
    layers: tuple[LayerSpec, ...]
    num_positions: int = 0
    embedding_scale: float = 1.0
    head_bias: bool = False
    logit_scale: float = 1.0
    logit_soft_cap: float | None = None

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

    def rows(self, weight: Weight, index: torch.Tensor | slice) -> Weight:
        """Return the rows at these indices."""
        ...

    def shard(self, weight: Weight, dim: int, start: int, stop: int) -> Weight:
        """Return rows (dim 0) or columns (dim 1) `start` to `stop`; raise CompositionError where a group is cut."""
        ...


class StorableFormat(WeightFormat, Protocol):
    """A format that files can have, whose size follows from a weight's shape."""

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        """Return the bytes of a weight (N, C)."""
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

    def rows(self, index: torch.Tensor | slice) -> Weight:
        """Return the rows at these indices."""
        return self.format.rows(self, index)

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

    def rows(self, weight: Weight, index: torch.Tensor | slice) -> Weight:
        return dense(weight.tensors["weight"][index])

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


@runtime_checkable
class StoredWeight(StoredTensor, Protocol):
    """A matrix that its file stores in a weight format: `read` dequantizes it, `read_weight` does not."""

    @property
    def weight_format(self) -> StorableFormat:
        """The format of what `read_weight` returns."""
        ...

    def read_weight(self) -> Weight:
        """Return the weight in its format, with tensors of its own."""
        ...


@runtime_checkable
class SliceableTensor(StoredTensor, Protocol):
    """A tensor of which a part can be read without the rest."""

    def read_slice(self, out: torch.Tensor, rows: range, columns: range) -> None:
        """Write some rows, and of a matrix some of their columns, into `out`, as `read` does with all.

        Args:
            out: of the shape of the part and any float dtype, contiguous or not.
            rows: one after another; their step is 1.
            columns: likewise; of a vector all that there are, an empty range.
        """
        ...


@frozen
class Part:
    """Which numbers of a tensor one rank holds, where ranks share a model.

    Attributes:
        rows: ranges (start, stop) of the whole's rows, in order, laid end to end.
        columns: the range of a matrix's columns; None is all of them.
        padding: rows behind them, so that ranks hold equally many. Of plain numbers they are zeros; of a weight in
            another format they can be any, and nothing may depend on them.
    """

    rows: tuple[tuple[int, int], ...]
    columns: tuple[int, int] | None = None
    padding: int = 0

    @property
    def num_rows(self) -> int:
        """Rows with padding."""
        return sum(stop - start for start, stop in self.rows) + self.padding


@frozen
class TensorSource:
    """Where one tensor of the model comes from: the checkpoint tensors that are laid end to end along dim 0.

    Attributes:
        names, shapes: of the checkpoint's tensors.
        transposed: the one tensor is a matrix that the checkpoint stores the other way round, (C, N).
        float32: it stays in float32, whatever dtype the model runs in.
        offset: added to every number.
        kept: the weight format that it keeps in memory, its tensors being `StoredWeight`s; None where it is read as
            plain numbers.
        part: what one rank holds of it; None is the whole.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    transposed: bool = False
    float32: bool = False
    offset: float = 0.0
    kept: StorableFormat | None = None
    part: Part | None = None

    @property
    def whole(self) -> tuple[int, ...]:
        """The shape of the whole, as the model has it."""
        if self.transposed:
            return self.shapes[0][::-1]
        return (sum(shape[0] for shape in self.shapes), *self.shapes[0][1:])

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of what is held: of the part, or the whole."""
        if self.part is None:
            return self.whole
        first, last = self.part.columns or (0, 0)
        return (self.part.num_rows, *(self.whole[1:] if self.part.columns is None else (last - first,)))


@frozen
class WeightMap:
    """Which checkpoint tensors make the model's, and which may be there unread.

    Attributes:
        tensors: canonical name -> source, in the order they are loaded. The names are listed in `models/weights.py`.
        ignored: glob patterns of checkpoint tensors that a family knows and does not need.
        has_head: whether logits are made here: a pipeline's first stage can hold an embedding that the head is tied to,
            without the head.
    """

    tensors: Mapping[str, TensorSource]
    ignored: tuple[str, ...] = ()
    has_head: bool = True

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

    @property
    def sampling(self) -> Mapping[str, Any]:
        """What the files recommend for sampling, in the spelling of Hugging Face's generation_config.json."""
        ...

    @property
    def keeps_weights(self) -> bool:
        """Whether weights that the files store in few bits stay so in memory, unless a config says otherwise."""
        ...

    def tokenizer(self) -> TokenizerSpec | None:
        """The tokenizer, or None where the files have none; raise CheckpointError where it is malformed."""
        ...
