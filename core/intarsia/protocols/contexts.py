"""What each kind of part is built from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from attrs import Factory, frozen

from intarsia.protocols.choosing import Drafter, LogitsProcessor
from intarsia.protocols.composition import Parts, Selection
from intarsia.protocols.execution import Choosing, Demands, Stage
from intarsia.protocols.forward import AttentionBackend, CacheStorage, Runner
from intarsia.protocols.model import Quantizer
from intarsia.protocols.serving import EngineHandle
from intarsia.times import Times
from intarsia.types import (
    CacheLayout,
    Checkpoint,
    DecoderSpec,
    EngineConfig,
    EngineOptions,
    NoOptions,
    Provider,
    Share,
    TokenizerSpec,
    Weight,
    WeightMap,
)

if TYPE_CHECKING:
    import torch


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
        selections: whose the parts above are.
        times: where what an executor drives counts its seconds; `Choosing.finish` tells them.
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
    selections: tuple[Selection, ...] = ()
    times: Times = Factory(Times)


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
