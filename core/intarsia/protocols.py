"""What each kind of part can do, and the context each is built from.

Every method says its side effects. Parts are single-threaded: the engine calls them from its own thread.
Shape legend: T tokens, R rows, L rows of logits, H heads, K kv heads, D head dim, E embed, V vocab.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from attrs import Factory, frozen

from intarsia.types import (
    AttentionSpec,
    BatchPlan,
    CacheLayout,
    CacheMove,
    CacheStats,
    Checkpoint,
    DecoderSpec,
    Demand,
    Draft,
    EngineConfig,
    EngineOptions,
    Entered,
    ForwardBatch,
    Invariance,
    NoOptions,
    Output,
    Prompt,
    Provider,
    Request,
    Row,
    RowResult,
    SamplingDefaults,
    SamplingParams,
    SequenceId,
    Share,
    StepResult,
    SwapPrices,
    SwapStats,
    TokenizerSpec,
    Weight,
    WeightMap,
)

if TYPE_CHECKING:
    from concurrent.futures import Future

    import click
    import torch

__all__ = [
    "AttentionBackend",
    "CacheAllocator",
    "CacheContext",
    "CacheStorage",
    "Choosing",
    "Command",
    "CommandContext",
    "Context",
    "Demands",
    "Divisible",
    "DraftRequest",
    "Drafter",
    "DrafterContext",
    "EngineHandle",
    "Executor",
    "ExecutorContext",
    "FixedAttention",
    "Frontend",
    "FrontendContext",
    "InnerRunner",
    "Kernel",
    "Kernels",
    "LayerCache",
    "Loader",
    "LoaderContext",
    "LogitsProcessor",
    "ModelContext",
    "ModelFamily",
    "PartContext",
    "Partition",
    "PartitionContext",
    "Parts",
    "PlansAhead",
    "PreparingRunner",
    "Progress",
    "Quantizer",
    "ResolvesPending",
    "Runner",
    "RunnerContext",
    "Scheduler",
    "Selection",
    "SequenceProcessor",
    "SequenceView",
    "Stage",
    "StepCost",
    "StorageMaker",
    "SwappingAllocator",
    "SwappingStorage",
    "Target",
    "TokenizerView",
    "Verified",
]

# --- contexts ---------------------------------------------------------------------------------------------------------


@frozen(kw_only=True)
class Context:
    """What every part is built from.

    Attributes:
        options: an instance of the provider's `options` class.
        engine: the shared options; device, dtype, max_model_len and threads are resolved from `PartContext` on.
    """

    options: Any = Factory(NoOptions)
    engine: EngineOptions = Factory(EngineOptions)


@frozen(kw_only=True)
class LoaderContext(Context):
    """For loaders.

    Attributes:
        path: where the model's files are: a file or a folder that exists.
    """

    path: Path


@frozen(kw_only=True)
class ModelContext(Context):
    """For families.

    Attributes:
        config: the checkpoint's, in Hugging Face's spelling.
    """

    config: Mapping[str, Any]


@frozen(kw_only=True)
class PartitionContext(Context):
    """For executors that share a model out between ranks, before any other part is chosen.

    Attributes:
        spec: the whole model.
        num_ids: token ids that can be chosen.
    """

    spec: DecoderSpec
    num_ids: int


class Partition(Protocol):
    """How a model is shared out between ranks, seen from one of them. Every rank composes the same config."""

    @property
    def shares(self) -> Sequence[Share]:
        """What each rank holds, by rank."""
        ...

    @property
    def share(self) -> Share:
        """What this rank holds."""
        ...

    @property
    def peers(self) -> int:
        """How many ranks share this machine's cores and this device's memory, this one included."""
        ...

    @property
    def device(self) -> str:
        """The device of this rank; empty is the engine's."""
        ...

    @property
    def needs(self) -> frozenset[str]:
        """What a runner must be able to do, see `Provider.parallel`."""
        ...

    def cut(self, weight_map: WeightMap, share: Share) -> WeightMap:
        """Return what a rank loads of a model's weights. Names and shapes of the files stay the whole model's."""
        ...

    def bind(self, ops: Any) -> Any:
        """Return the ops (`intarsia.ops.Ops`) with the collectives of this rank."""
        ...

    def divides(self, ranks: int) -> bool:
        """Whether so many ranks could hold slices of each layer of this model."""
        ...

    def report(self, engine: EngineOptions) -> Mapping[str, Any]:
        """Return plain data for `explain`: the ranks, and by formula a token's traffic and activations."""
        ...


class TokenizerView(Protocol):
    """What parts see of the model's tokenizer."""

    @property
    def spec(self) -> TokenizerSpec:
        """The tokenizer as data, for libraries that read a `tokenizer.json`."""
        ...

    @property
    def vocab_size(self) -> int:
        """The largest id + 1."""
        ...

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end a generation."""
        ...

    def encode(self, text: str) -> list[int]:
        """Return the ids of a plain prompt."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds inside a text; empty for special tokens and ids without one."""
        ...


@frozen(kw_only=True)
class PartContext(Context):
    """For the parts of a running engine.

    Attributes:
        spec: the model; where ranks share one, what this rank runs of it.
        num_ids: token ids that can be chosen; a padded vocabulary has logits beyond them.
        tokenizer: None where the model has none.
        parts: slot -> part, for the slots that the provider `requires`; a tuple where a slot holds several.
        partition: how ranks share the model; None where one device has all of it.
    """

    spec: DecoderSpec
    num_ids: int = 0
    tokenizer: TokenizerView | None = None
    parts: Mapping[str, Any] = Factory(dict)
    partition: Partition | None = None


@frozen(kw_only=True)
class CacheContext(PartContext):
    """For cache allocators.

    Attributes:
        layout: how the cache lies, as the composition agreed on.
        num_pages: how many pages its memory holds.
        num_host_pages: how many pages of each group the host memory of `cache.swap` holds.
    """

    layout: CacheLayout
    num_pages: int
    num_host_pages: int = 0


@frozen(kw_only=True)
class RunnerContext(PartContext):
    """For runners.

    Attributes:
        layout: how the cache lies.
        ops: the named ops, resolved for device, dtype and weight formats.
        attention: the attention backend.
        weights: canonical name -> weight or tensor; empty while `fit` is asked, since weights load later.
        inner: for a runner that wraps another: returns the one of a key, or with `auto` the best that is no wrapper;
            raises as composition does. None for the runner that is wrapped.
    """

    layout: CacheLayout
    ops: Any
    attention: AttentionBackend
    weights: Mapping[str, Weight | torch.Tensor] = Factory(dict)
    inner: Callable[[str], InnerRunner] | None = None


@frozen(kw_only=True)
class InnerRunner:
    """A runner that another wraps.

    Attributes:
        provider: who offers it.
        build: makes it around the weights of the wrapper's context.
    """

    provider: Provider
    build: Callable[[], Runner]


@frozen(kw_only=True)
class ExecutorContext(PartContext):
    """For executors: all that a rank needs to load its weights and run plans.

    Attributes:
        config: the engine's, as plain data that a config can be read from again.
        checkpoint: the model's files, opened.
        weight_map: which of their tensors make the model's.
        layout: how the cache lies.
        num_pages: how many pages page tables can name, from 0 on.
        attention: the attention backend, which prepares once a step.
        quantizers: what weights go through as they load, in order.
        build_runner: makes the chosen runner around loaded weights.
        drafter: None where nothing is drafted.
        logits_processors: what logits go through before a token is chosen, in order.
        pinned_memory: a `cache.memory` that gives every rank as many pages as this one.
        build_stage, build_choosing, build_demands: make, from this context, what an executor drives.
        make_storage: makes the cache's tensors where the allocator does so itself, see `StorageMaker`; else None.
        num_host_pages: pages of each group that swapped-out sequences can have in host memory.
    """

    checkpoint: Checkpoint
    weight_map: WeightMap
    layout: CacheLayout
    num_pages: int
    ops: Any
    attention: AttentionBackend
    quantizers: tuple[Quantizer, ...]
    build_runner: Callable[[Mapping[str, Weight | torch.Tensor]], Runner]
    drafter: Drafter | None
    logits_processors: tuple[LogitsProcessor, ...]
    config: Mapping[str, Any]
    pinned_memory: str
    build_stage: Callable[[ExecutorContext], Stage]
    build_choosing: Callable[[ExecutorContext], Choosing]
    build_demands: Callable[[ExecutorContext], Demands]
    make_storage: Callable[[int, torch.device], CacheStorage] | None = None
    num_host_pages: int = 0


@frozen(kw_only=True)
class DrafterContext(PartContext):
    """For drafters.

    Attributes:
        load_model: composes a second model: `load_model(reference, **sections)`, where sections are a config's, such as
            `cache={"memory": "1GiB"}`, over the engine's own device and length. Returns parts with a cache and an
            executor of their own, not started. The executor is a `Target` too. Raises as `compose` does, in the name of
            `drafter.model`.
    """

    load_model: Callable[..., Parts]


@frozen(kw_only=True)
class FrontendContext(Context):
    """For frontends.

    Attributes:
        config: what they serve.
        start_engine: makes the engine, which they own and close.
    """

    config: EngineConfig
    start_engine: Callable[[], EngineHandle]


@frozen(kw_only=True)
class CommandContext(Context):
    """For commands.

    Attributes:
        load_config: reads a config, `load_config(file or mapping, overrides)`, as the options -c and -o do.
        compose: chooses and checks the parts of a config's engine, over the plugins that are installed; loads no
            weights. Raises as an engine does.
    """

    load_config: Callable[..., EngineConfig]
    compose: Callable[[EngineConfig], Parts]


# --- model files and weights ------------------------------------------------------------------------------------------


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


# --- the step ---------------------------------------------------------------------------------------------------------


class AttentionBackend(Protocol):
    """Attention over the cache. Prepares once a step, attends once a layer."""

    @property
    def orders(self) -> Sequence[str]:
        """Cache axis orders that it reads, best first."""
        ...

    @property
    def formats(self) -> Sequence[str]:
        """Cache entry formats that it reads: dtype names, or a quantized format's."""
        ...

    def invariance(self, dtype: str) -> Invariance:
        """What it promises of a row's result when the batch around the row, or its chunking, changes."""
        ...

    def prepare(self, batch: ForwardBatch, layout: CacheLayout) -> Any:
        """Return metadata for the step, handed to every `attend` of it in `batch.attention`. No side effects."""
        ...

    def attend(
        self, q_THD: torch.Tensor, cache: LayerCache, spec: AttentionSpec, group: int, batch: ForwardBatch
    ) -> torch.Tensor:
        """Return (T, H, D): each token over the keys of its row up to itself. Keys of this step are written already.

        Reads no slot past a row's last token: what lies there can be anything, NaN included.
        """
        ...


@runtime_checkable
class FixedAttention(Protocol):
    """What an attention backend can do besides, so that a CUDA graph can hold it: decode over fixed buffers."""

    def prepare_fixed(self, batch: ForwardBatch, layout: CacheLayout, max_len: int) -> Any:
        """Prepare rows of one token each, as `prepare` does, so that steps differ only in what tensors hold.

        Shapes, and all that is no tensor, depend on the number of rows, the layout and `max_len` alone. With such
        metadata `attend` launches the same kernels with the same arguments each time, and the host waits for nothing.
        The metadata has a method `refill(other)`, which takes the numbers of a later step's into its own tensors: those
        that the graph reads. `attend` may read the batch's tensors too, and nothing else of it.

        Args:
            batch: rows of one token each. Some may be padding, of position 0 in the spare page.
            layout: of the cache.
            max_len: no row has more tokens, its own included.
        """
        ...


class LayerCache(Protocol):
    """One layer's tensors of the cache, in the layout's order.

    In the entry format `int8` a key or value is its numbers times its scale: the dequantized entry (see
    `intarsia.ops.int8_entries`). A scale of NaN says that what was written was not finite. None of the tensors need be
    contiguous; the last axis of keys and values is.
    """

    @property
    def keys(self) -> torch.Tensor:
        """Keys of all pages."""
        ...

    @property
    def values(self) -> torch.Tensor:
        """Values of all pages."""
        ...

    @property
    def key_scales(self) -> torch.Tensor | None:
        """fp32 scales of the keys, with the keys' axes but the last; None where the entry format has none."""
        ...

    @property
    def value_scales(self) -> torch.Tensor | None:
        """fp32 scales of the values, likewise."""
        ...


class CacheStorage(Protocol):
    """One rank's tensors of the cache."""

    def layer(self, index: int) -> LayerCache:
        """Return the tensors of one layer."""
        ...

    def move(self, moves: Sequence[CacheMove]) -> None:
        """Do a plan's cache work, in order."""
        ...

    def fill(self, value: float) -> None:
        """Set every entry that has memory: of quantized ones the scale, to a number of 1. For tests."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes it holds."""
        ...

    def close(self) -> None:
        """Give the memory back; nothing reads it any more. Safe to call twice."""
        ...


@runtime_checkable
class SwappingStorage(Protocol):
    """What a `CacheStorage` can do besides: copy pages to host memory and back, as `swap_out` and `swap_in` say.

    The copies of a plan are done in order with its other moves: a page that is swapped out can be written to by a move
    behind that and by the step's rows, and a page that is swapped in is there for them.
    """

    def take_swapped(self) -> tuple[int, float]:
        """Return how many bytes were copied, and the seconds that took, of copies that are over; forget them."""
        ...


class Runner(Protocol):
    """Runs a range of layers on a ForwardBatch. The ops are the meaning: every runner equals them."""

    def run(
        self, batch: ForwardBatch, cache: CacheStorage, layers: range, hidden_TE: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run a range of layers, writing their keys and values into the cache; return the residual stream (T, E).

        Without `hidden_TE` the range starts at 0, and the batch's ids are embedded. Ranges serve layer skipping, and
        stages of a pipeline, whose layers are numbered from 0.
        """
        ...

    def logits(self, hidden_TE: torch.Tensor, rows_L: torch.Tensor) -> torch.Tensor:
        """Return fp32 logits (L, V) of the tokens at these indices of the residual stream."""
        ...


@runtime_checkable
class PreparingRunner(Protocol):
    """What a runner can do besides: decide what is prepared for a step, in the attention backend's place."""

    def prepare(self, batch: ForwardBatch, layout: CacheLayout) -> Any:
        """Return what the batch of the next `run` holds in `attention`."""
        ...


class SequenceView(Protocol):
    """What schedulers see of a sequence. The engine owns it and changes it between calls."""

    @property
    def sequence_id(self) -> SequenceId:
        """Request id and choice."""
        ...

    @property
    def token_ids(self) -> Sequence[int]:
        """Prompt and accepted tokens."""
        ...

    @property
    def num_prompt(self) -> int:
        """How many of them are the prompt."""
        ...

    @property
    def num_computed(self) -> int:
        """How many of them have their keys and values in the cache. Schedulers' own books may run ahead of it."""
        ...

    @property
    def max_total(self) -> int:
        """The most tokens it can ever hold: prompt and limit."""
        ...

    @property
    def priority(self) -> int:
        """Higher runs first."""
        ...

    @property
    def salt(self) -> str:
        """Its cached prefixes are shared with sequences of an equal salt alone."""
        ...

    @property
    def params(self) -> SamplingParams:
        """What was asked."""
        ...

    def entered(self) -> Entered:
        """Return what a plan tells an executor when the sequence's first row comes, or its first after a preemption."""
        ...


class CacheAllocator(Protocol):
    """Keeps the books of the cache's pages. Needs no torch; the tensors are the executor's.

    One page table a cache group. `num_computed` tokens of a sequence have valid slots; only accepted tokens count.
    """

    @property
    def num_pages(self) -> int:
        """Pages in all."""
        ...

    @property
    def shares_prefixes(self) -> bool:
        """Whether a sequence can find what another with equal first tokens has computed."""
        ...

    def capacity(self, max_tokens: int) -> int:
        """Return how many sequences that each grow to `max_tokens` fit at once in an empty cache."""
        ...

    def lookup(self, token_ids: Sequence[int], salt: str = "") -> int:
        """Return how many leading tokens `reserve` would find cached. No side effects."""
        ...

    def reserve(self, sequence_id: SequenceId, token_ids: Sequence[int], num_tokens: int, salt: str = "") -> int | None:
        """Make room for a sequence to hold `num_tokens`, of which `token_ids` are the known ones.

        Returns how many leading tokens have valid slots by now, prefix hits included, or None where there is no room;
        then nothing has changed.
        """
        ...

    def pages(self, sequence_id: SequenceId) -> tuple[tuple[int, ...], ...]:
        """Return the page table, one tuple a group, in the order of positions."""
        ...

    def commit(self, sequence_id: SequenceId, token_ids: Sequence[int], num_computed: int) -> None:
        """Tell that the first `num_computed` of these accepted tokens are in the cache; full pages may be shared."""
        ...

    def rewind(self, sequence_id: SequenceId, num_tokens: int) -> None:
        """Forget all slots from position `num_tokens` on, such as those of rejected drafts."""
        ...

    def fork(self, parent: SequenceId, child: SequenceId, num_tokens: int) -> bool:
        """Let `child` start with the first `num_tokens` that `parent` has computed.

        Returns False where there is no room, or a window has left behind what the next token would see; then nothing
        has changed. Pages that both would write to are copied, by `take_moves`, before one of them does.
        """
        ...

    def release(self, sequence_id: SequenceId) -> None:
        """Give a sequence's pages back. Unknown ids are ignored: a request can be cancelled twice."""
        ...

    def take_moves(self) -> tuple[CacheMove, ...]:
        """Return the page copies due before the next step, and forget them."""
        ...

    def check_integrity(self) -> None:
        """Raise AssertionError where a page is lost, or owned twice without being shared."""
        ...

    def stats(self) -> CacheStats:
        """Return the books' figures."""
        ...


@runtime_checkable
class StorageMaker(Protocol):
    """What a cache allocator can do besides: make the storage that its page tables are for.

    Such an allocator can name more pages than have memory at once, and says in its moves which have.
    """

    @property
    def num_page_ids(self) -> int:
        """How many pages its tables can name, from 0 on."""
        ...

    def make_storage(self, num_pages: int, device: torch.device) -> CacheStorage:
        """Return one rank's tensors.

        Args:
            num_pages: `num_page_ids`, and behind these the pages that a drafter took, which always have memory. So has
                the spare page behind them all.
            device: where the memory is.

        Raises:
            ExecutionError: the device refuses.
        """
        ...


@runtime_checkable
class SwappingAllocator(Protocol):
    """What a cache allocator can do besides: keep the pages of preempted sequences in host memory.

    `reserve` brings a swapped sequence's pages back, and then returns as many tokens as were valid when it left, or
    None where there is no room; then it stays swapped out. `release` gives its host pages back, and `fork` names it as
    neither parent nor child. Both ways the copies are moves of the next plan.
    """

    def swap_out(self, sequence_id: SequenceId) -> bool:
        """Move a sequence's valid tokens to host memory and give its pages back.

        Returns False where host memory has no room, or computing the tokens again is cheaper; then nothing has changed.
        """
        ...

    def price(self, prices: SwapPrices) -> None:
        """Learn what copying and computing were measured to take."""
        ...

    def swap_stats(self) -> SwapStats:
        """Return the figures of host memory."""
        ...


class Scheduler(Protocol):
    """Decides who runs in the next step. It holds the allocator; it never sees tensors."""

    def add(self, sequence: SequenceView) -> None:
        """Take a new sequence, one that fits an empty cache. Raise OverloadedError where the queue is full.

        Where it raises, nothing has changed.
        """
        ...

    def plan(self) -> BatchPlan:
        """Return the next step: who runs, how many tokens, who is preempted. No rows where nothing can run."""
        ...

    def update(self, plan: BatchPlan, results: Sequence[RowResult]) -> None:
        """Take a step's outcome. The sequences hold the accepted tokens by now, cut at stops; drafts are proposals."""
        ...

    def remove(self, sequence_id: SequenceId) -> None:
        """Forget a sequence that finished or was cancelled, in whatever state, and release its pages.

        It is never in a later plan. Unknown ids are ignored.
        """
        ...

    @property
    def num_waiting(self) -> int:
        """Sequences that have no pages."""
        ...

    @property
    def num_running(self) -> int:
        """Sequences that hold pages."""
        ...


@runtime_checkable
class PlansAhead(Protocol):
    """What a scheduler can do besides: plan a step while others are in flight. Others plan after each result.

    `update` tells of each step in turn. It leaves out rows whose sequence is gone by then.
    """

    def expect(self, plan: BatchPlan, *, names_pending: bool) -> None:
        """Take note that a plan was submitted; later ones come after it. Not called where one step is in flight alone.

        A row that wants a token is expected to bring one, as far as `max_total` allows. A sequence with a row in flight
        is not preempted, and is no parent or prefix for more than `num_computed` says.

        Args:
            plan: what `plan` returned last.
            names_pending: whether a row may name the id that is expected, by PENDING. Where not, and always after a row
                with drafts, a sequence whose row wants a token has its next one after the result.
        """
        ...


@frozen(kw_only=True)
class DraftRequest:
    """Ask for up to `wanted` guesses of what follows `token_ids`.

    Attributes:
        token_ids: prompt and accepted tokens; all but the last have their keys and values in the cache.
        pages: the sequence's page table, one tuple a cache group.
    """

    sequence_id: SequenceId
    token_ids: Sequence[int]
    wanted: int
    pages: tuple[tuple[int, ...], ...] = ()


@frozen(kw_only=True)
class Verified:
    """What became of one sequence's drafts: of `drafted` ids the first `accepted` were the target's own."""

    sequence_id: SequenceId
    drafted: int
    accepted: int


@frozen(kw_only=True)
class StepCost:
    """What a step took.

    Attributes:
        num_tokens: that ran, drafts among them.
        target_s: seconds for running and choosing.
        draft_s: seconds of the `propose` that made its drafts.
    """

    num_rows: int
    num_tokens: int
    target_s: float
    draft_s: float


class Target(Protocol):
    """A model that a drafter may run: the one that drafts are for, or the drafter's own."""

    @property
    def layout(self) -> CacheLayout:
        """How its cache lies."""
        ...

    def take_scratch(self, num_pages: int) -> tuple[int, ...]:
        """Return pages that no sequence ever holds, in every cache group, for positions that a row has no pages for.

        Called in `Drafter.start` alone: its cache is made after that.
        """
        ...

    def forward(
        self, rows: Sequence[Row], *, num_layers: int | None = None, moves: Sequence[CacheMove] = ()
    ) -> torch.Tensor:
        """Do the cache's work, then run rows and the head; return fp32 logits (R, V) after the last token of each row.

        Nothing is remembered but keys and values at the rows' positions, which whoever runs these positions next writes
        anew.

        Args:
            rows: without drafts; their ids are known. Those that want no logits get none.
            num_layers: how many of the first layers run; None is all.
            moves: of the cache's allocator.
        """
        ...

    def choose(
        self, sequence_ids: Sequence[SequenceId], drafts: Sequence[Sequence[int]], logits_RV: torch.Tensor
    ) -> Draft:
        """Choose one id a row from any model's logits as the row's request would, after its tokens and these drafts.

        With its penalties, processors and bans. Where drafts must be equal, the id is drawn with the number that the
        target draws with at that position, so that the two agree often; where they are verified by rejection, with one
        of its own, and the probabilities (R, V) are returned too. An id below 0: nothing could be chosen.

        Args:
            sequence_ids: sequences that have entered.
            drafts: for each of them, those before the position.
            logits_RV: fp32; changed in place. Logits of ids that no token has are ignored.
        """
        ...


class Drafter(Protocol):
    """Guesses the next tokens cheaply. Whatever it says, the output does not change.

    What it raises once it has started costs its guesses and nothing else: it is logged once and counted in `stats`. A
    subclass inherits all but `propose`.
    """

    def num_bytes(self, layout: CacheLayout) -> int:
        """Return the bytes that `start` will take, beside a target whose cache lies so. Called before it, for plans."""
        del layout
        return 0

    def start(self, target: Target) -> None:
        """Get ready: the target's weights are loaded, its cache is not made yet. Called once, before any step."""
        del target

    def enter(self, entered: Entered) -> None:
        """Hear of a sequence when its first row comes, or its first after a preemption."""
        del entered

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Draft]:
        """Return guesses for each request, possibly none. May keep state by sequence id."""
        ...

    def observe(self, verified: Sequence[Verified], cost: StepCost) -> None:
        """Hear what became of the drafts of a step, and what the step took. Called after each step with rows."""
        del verified, cost

    def forget(self, sequence_id: SequenceId) -> None:
        """Drop state of a sequence that left."""
        del sequence_id

    def stats(self) -> Mapping[str, Any]:
        """Return figures."""
        return {}

    def stop(self) -> None:
        """Free what `start` took. Safe to call twice, and without a start."""
        return


class LogitsProcessor(Protocol):
    """Changes the logits of the requests that ask for it. A subclass inherits all but `open`."""

    def applies(self, params: SamplingParams) -> bool:
        """Whether a request with these parameters needs it.

        All do by default. Asked when the request comes, and cheap. What it asks of this processor is in
        `params.logits_processors`, under the processor's key. Raise InvalidRequestError where that is malformed: the
        request is refused, before any step.
        """
        del params
        return True

    def prepare(self, params: SamplingParams) -> Future[object] | None:
        """Begin long work for a request that it applies to, outside the engine's thread; None where there is none.

        The request waits until the future is done, and the others go on. If the future raises InvalidRequestError, the
        request fails with its message. Requests can share a future: that of a request which is given up is not
        cancelled.
        """
        del params
        return None

    def open(self, params: SamplingParams, num_prompt: int) -> SequenceProcessor:
        """Return what processes one sequence of such a request. It is dropped when the sequence leaves."""
        ...


class SequenceProcessor(Protocol):
    """One sequence's logits processing: a pure function of the ids before a position. What it keeps is for speed alone.

    Ids can be other than at the call before: drafts are among them, and may have been rejected since.
    """

    def process(self, token_ids: Sequence[int], logits_V: torch.Tensor) -> None:
        """Change one row of fp32 logits in place. -inf forbids a token; one must be left.

        Args:
            token_ids: prompt, answer and drafts before this position.
            logits_V: the logits there, after penalties and biases.
        """
        ...


class Stage(Protocol):
    """One rank's part of the model, which an executor drives: weights, cache tensors and the chosen runner."""

    def load(self, progress: Progress) -> None:
        """Load the weights, and build the runner around them. Reads files; raise CheckpointError as loading does."""
        ...

    def allocate(self, num_scratch: int = 0) -> None:
        """Make the cache, with so many pages behind the pool that no sequence holds. Called once, after `load`."""
        ...

    def batch(self, rows: Sequence[Row], ids: Sequence[Sequence[int]]) -> ForwardBatch:
        """Lay rows with these ids, none of them pending, out as tensors, ready for attention. No side effects."""
        ...

    def run(
        self, batch: ForwardBatch, hidden_TE: torch.Tensor | None = None, num_layers: int | None = None
    ) -> torch.Tensor:
        """Run its first layers, or all, writing keys and values into the cache; return the residual stream (T, E).

        The first stage embeds the batch's ids; the others take up the `hidden_TE` that the stage before returned.
        Where activations are sharded along tokens, T is that of this rank.
        """
        ...

    def logits(self, hidden_TE: torch.Tensor, rows_L: Sequence[int]) -> torch.Tensor:
        """Return fp32 logits (L, V) of the tokens with these numbers, of this rank's ids. The last stage has them."""
        ...

    def move(self, moves: Sequence[CacheMove]) -> None:
        """Do a plan's cache work, in order."""
        ...

    def take_swapped(self) -> tuple[int, float]:
        """Return bytes copied between device and host and the seconds that took, see `SwappingStorage`."""
        ...

    def stop(self) -> None:
        """Drop weights and cache. Safe to call twice."""
        ...


class Choosing(Protocol):
    """Sampler, logits processors and drafter, which an executor hands logits to. One rank has it."""

    def start(self, target: Target) -> None:
        """Let the drafter get ready: weights are loaded, the cache is not made yet."""
        ...

    def meet(self, plan: BatchPlan) -> None:
        """Forget sequences that left, and take those that enter."""
        ...

    def ids(self, row: Row) -> Sequence[int]:
        """Return a row's token ids: pending ones have been chosen by now."""
        ...

    def choose(
        self, rows: Sequence[Row], bounds: Sequence[int], logits_of: Callable[[Demand], torch.Tensor]
    ) -> Sequence[RowResult]:
        """Score prompts and choose tokens, and remember these.

        Args:
            rows: some of a plan's, each whole or a piece that begins where the piece before ended.
            bounds: where each begins among the tokens that ran with them.
            logits_of: returns fp32 logits (L, V) of the whole vocabulary. Called once a demand, in the order of
                `Demands.of`, whatever fails. They are changed in place.
        """
        ...

    def finish(self, rows: Sequence[Row], results: Sequence[RowResult], target_s: float) -> StepResult:
        """Return the whole step's result, once all its rows are chosen: the drafter learns and proposes."""
        ...

    def guess(
        self, sequence_ids: Sequence[SequenceId], drafts: Sequence[Sequence[int]], logits_RV: torch.Tensor
    ) -> Draft:
        """Choose from a drafter's logits, see `Target.choose`."""
        ...

    def stop(self) -> None:
        """Let the drafter free what it took."""
        ...


class Demands(Protocol):
    """Which logits choosing will ask for, known from plans alone: so that every rank takes part in gathering them."""

    def meet(self, plan: BatchPlan) -> None:
        """Forget sequences that left, and take those that enter."""
        ...

    def of(self, rows: Sequence[Row], bounds: Sequence[int]) -> Sequence[Demand]:
        """Return the demands in their order; the last is for choosing tokens, and its rows can be none."""
        ...


class Executor(Protocol):
    """Runs plans: on this process's device, or over many."""

    @property
    def depth(self) -> int:
        """How many steps may be in flight at once."""
        ...

    def start(self, progress: Progress) -> None:
        """Load weights, make the cache, warm up. Called once, before any plan."""
        ...

    def submit(self, plan: BatchPlan) -> None:
        """Begin a step. At most `depth` are in flight.

        Steps read and write the cache in the order in which they were submitted, moves included: so pages of a sequence
        that is gone may be in a later plan while a step that writes to them is in flight.
        """
        ...

    def collect(self) -> StepResult:
        """Wait for the oldest step in flight and return what it chose. A row's failure is in its result."""
        ...

    def stop(self) -> None:
        """Free what `start` took. Safe to call twice, and after a failed start."""
        ...


@runtime_checkable
class ResolvesPending(Protocol):
    """What an executor of some depth can do besides: run rows whose ids a step in flight chooses."""

    @property
    def resolves_pending(self) -> bool:
        """Whether rows may name PENDING ids. Where not, a sequence is in one step in flight at a time."""
        ...


# --- ways in ----------------------------------------------------------------------------------------------------------


class Progress(Protocol):
    """Told of long work: (what, done, total). Called often; must be cheap."""

    def __call__(self, what: str, done: int, total: int) -> None:
        """Show that `done` of `total` is done."""
        ...


class EngineHandle(Protocol):
    """What a frontend drives. The engine is single-threaded: one thread calls it."""

    def add(self, request: Request) -> str:
        """Take a request; raise InvalidRequestError or OverloadedError, then nothing has changed."""
        ...

    def step(self) -> Sequence[Output]:
        """Run one step and return what it brought; empty where there was nothing to do."""
        ...

    def cancel(self, request_id: str) -> None:
        """End a request; its last outputs, with finish_reason `abort`, come from the next `step`."""
        ...

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do or to return."""
        ...

    @property
    def parts(self) -> Parts:
        """What the engine is made of."""
        ...

    def tokenize(self, prompt: Prompt) -> list[int]:
        """Return a prompt's token ids; raise InvalidRequestError as `add` does."""
        ...

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ids; raise InvalidRequestError where the model has no tokenizer."""
        ...

    def stats(self) -> Mapping[str, Any]:
        """Return figures: queues, cache, steps, tokens."""
        ...

    def explain(self) -> Mapping[str, Any]:
        """Return what the engine is made of and why."""
        ...

    def close(self) -> None:
        """Stop the engine."""
        ...


class Frontend(Protocol):
    """A way in: serves an engine to clients."""

    def serve(self) -> None:
        """Run until told to stop."""
        ...


class Command(Protocol):
    """A CLI command of a plugin."""

    def command(self) -> click.Command:
        """Return the click command; its name is the provider's key."""
        ...


# --- the composition --------------------------------------------------------------------------------------------------


@frozen(kw_only=True)
class Selection:
    """One choice that composition made.

    Attributes:
        slot: where the part goes.
        provider: who offered it.
        plugin, distribution, version: whose plugin that is.
        asked_by: `config` where a config named it, `auto` where composition chose.
        reason: why it was chosen; for `auto`, what the part said of its fit and who was passed over.
        options: the instance of its options class.
    """

    slot: str
    provider: Provider
    plugin: str
    distribution: str
    version: str
    asked_by: str
    reason: str
    options: Any


@frozen(kw_only=True)
class Parts:
    """The composed parts of an engine, before weights load: what `check_composition` judges.

    Where ranks share the model, `spec` and `weight_map` are the whole model's. What parts were built from, such as
    `weight_bytes`, `layout` and `ops`, is this rank's.

    Attributes:
        engine: the shared options, with device, dtype, max_model_len and threads resolved.
        selections: every choice with its reason, in the order of composition.
        tokenizer: None where the model's files have none; then prompts are token ids.
        weight_bytes: of all weights as they will be in memory.
        num_ids: token ids that can be chosen; a padded vocabulary has logits beyond them.
        sampling: what requests take that do not say.
        ops: the table of named ops, resolved.
        invariance: the level that the whole keeps: the weakest of its parts'.
        partition: how ranks share the model; None where one device has all of it.
        num_host_pages: pages of each cache group in host memory, for sequences that are swapped out.
    """

    engine: EngineOptions
    selections: tuple[Selection, ...]
    checkpoint: Checkpoint
    tokenizer: Any
    spec: DecoderSpec
    weight_map: WeightMap
    weight_bytes: int
    layout: CacheLayout
    num_pages: int
    num_ids: int
    ops: Any
    attention: AttentionBackend
    cache: CacheAllocator
    scheduler: Scheduler
    executor: Executor
    invariance: Invariance
    quantizers: tuple[Quantizer, ...] = ()
    drafter: Drafter | None = None
    logits_processors: tuple[LogitsProcessor, ...] = ()
    sampling: SamplingDefaults = Factory(SamplingDefaults)
    partition: Partition | None = None
    num_host_pages: int = 0

    def selection(self, slot: str) -> Selection:
        """Return the (first) choice for a slot; KeyError where the slot is empty."""
        for selection in self.selections:
            if selection.slot == slot:
                return selection
        raise KeyError(slot)
