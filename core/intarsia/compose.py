"""config + providers -> Parts. Every check is made here, before weights load.

Parts are chosen in the order of `KINDS`, each knowing the model and the parts before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, get_args

import torch
from attrs import define, evolve, frozen

from intarsia.choosing import build_choosing
from intarsia.config import as_dict, load_config
from intarsia.demands import build_demands
from intarsia.deprecations import old_arguments
from intarsia.errors import (
    CheckpointError,
    CompositionError,
    ConfigError,
    IntarsiaError,
    PluginError,
    did_you_mean,
    nearest,
)
from intarsia.invariance import kept_invariance, verified_invariance
from intarsia.layout import (
    check_capacity,
    check_cuts,
    check_memory,
    check_swap,
    check_swaps,
    lay_out,
    num_host_pages,
    num_pages,
    page_bytes,
    weight_bytes,
)
from intarsia.machine import free_memory, resolve_device, resolve_dtype, resolve_threads
from intarsia.models.weights import Weights, check_tensors, keep_stored
from intarsia.ops import BY_FORMAT, NAMES, OPS, Ops, resolve
from intarsia.plugins import Registry
from intarsia.protocols import (
    AttentionBackend,
    CacheAllocator,
    CacheContext,
    Drafter,
    DrafterContext,
    EngineHandle,
    ExecutorContext,
    FrontendContext,
    InnerRunner,
    Kernel,
    Kernels,
    LoaderContext,
    LogitsProcessor,
    ModelContext,
    PartContext,
    Partition,
    PartitionContext,
    Parts,
    Quantizer,
    RunnerContext,
    StorageMaker,
)
from intarsia.recommended import recommended
from intarsia.references import find_model
from intarsia.saying import said
from intarsia.selection import Chosen, Selector, UnfitError, blamed, titled
from intarsia.stage import build_stage
from intarsia.structuring import shown
from intarsia.text import Tokenizer
from intarsia.types import (
    AUTO,
    CacheOptions,
    Checkpoint,
    Choice,
    DecoderSpec,
    Dtype,
    EngineConfig,
    EngineOptions,
    SamplingDefaults,
    Share,
    WeightMap,
)


def compose(config: EngineConfig, registry: Registry) -> Parts:
    """Choose and check every part of an engine.

    Raises:
        ConfigError: a key, an option or a value is wrong.
        ModelNotFoundError, CheckpointError: the model's files are not there, or not right.
        CompositionError: parts do not fit the model, the machine or each other.
        PluginError: a plugin's code fails or breaks its contract.
    """
    parts = _Composer(config, Selector(registry)).compose()
    ask_plugins(config, parts, registry)
    return parts


def ask_plugins(config: EngineConfig, parts: Parts, registry: Registry) -> None:
    """Let each plugin that implements `check_composition` refuse; what else it raises becomes a PluginError."""
    facts = old_arguments("check_composition", {"config": config, "parts": parts})
    for check in registry.hook.check_composition.get_hookimpls():
        plugin = next(plugin for plugin in registry.plugins if plugin.module is check.plugin)
        if check.wrapper or check.hookwrapper:
            raise PluginError(f"{plugin}: check_composition judges parts and cannot wrap others' checks")
        try:
            check.function(**{name: facts[name] for name in check.argnames})
        except IntarsiaError:
            raise
        except Exception as error:
            raise PluginError(f"{plugin}: check_composition failed: {said(error)}") from error


@frozen
class _SecondModels:
    """Composes drafters' own models beside a target's.

    Attributes:
        engine: the target's options, resolved.
        registry: the plugins.
        taken: bytes that the target takes.
    """

    engine: EngineOptions
    registry: Registry
    taken: int

    def load(self, reference: str, **sections: Any) -> Parts:
        """Compose one; see `DrafterContext.load_model`."""
        shared = ("device", "dtype", "max_model_len", "threads", "log_level")
        engine = {name: getattr(self.engine, name) for name in shared} | dict(sections.pop("engine", {}))
        try:
            config = load_config({"model": reference, "executor": "local", **sections, "engine": engine})
            return _Composer(config, Selector(self.registry), taken=self.taken, caps_length=True).compose()
        except IntarsiaError as error:
            message = f"drafter.model: {reference!r} cannot be composed: {error}"
            raise type(error)(message, field="drafter.model") from error


@frozen
class _Model:
    """A model, opened: what its files and its family say."""

    checkpoint: Checkpoint
    spec: DecoderSpec
    weight_map: WeightMap
    tokenizer: Tokenizer | None
    sampling: SamplingDefaults

    @property
    def num_ids(self) -> int:
        """Token ids that can be chosen: a padded vocabulary has logits beyond the tokenizer's."""
        size = self.spec.vocab_size
        return size if self.tokenizer is None else min(size, self.tokenizer.vocab_size)


@define
class _Composer:
    """Composes one model's parts.

    Attributes:
        config: what is asked for.
        select: fills the slots.
        taken: bytes on the device that others will take: the model that a drafter's own model drafts for.
        caps_length: whether max_model_len is a wish: a drafter's model drafts as far as it was trained for.
    """

    config: EngineConfig
    select: Selector
    taken: int = 0
    caps_length: bool = False

    def compose(self) -> Parts:
        config, select = self.config, self.select
        model = self._open_model()
        partition, engine = self._share_out(model, self._resolve_engine(model.spec))
        facts: dict[str, Any] = {
            "engine": engine,
            "spec": model.spec if partition is None else partition.share.spec,
            "num_ids": model.num_ids,
            "tokenizer": model.tokenizer,
            "partition": partition,
        }
        context: Callable[..., PartContext] = partial(PartContext, **facts)

        quantizers: tuple[Quantizer, ...] = select.many("quantizer", config.quantizer, context)
        kernels: tuple[Kernels, ...] = select.many("kernels", config.kernels, context)
        model = self._keep_stored(model, quantizers)
        kept = {source.kept.name: None for source in model.weight_map.tensors.values() if source.kept is not None}
        formats = ["dense", *(q.format for q in quantizers), *kept]
        sets = self._kernel_sets(kernels)

        def ops_for(dtype: Dtype) -> Ops:
            found = resolve(sets, dtype, formats, engine.device)
            return found if partition is None else partition.bind(found)

        ops = ops_for(engine.dtype)
        attention: AttentionBackend = select.one("attention", config.attention, context)
        orders = self._orders(attention, ops)
        weight_map = model.weight_map
        if partition is not None:
            weight_map = partition.cut(weight_map, partition.share)
            check_cuts(weight_map, quantizers, partition)

        with blamed("accepts or num_bytes", *(chosen.offer for chosen in select.of("quantizer"))):
            weights = weight_bytes(weight_map, quantizers, ops, engine.dtype)
        cache, runner, placed = self._place(context, attention, ops, model.spec, orders, weights)
        layout = placed.layout
        taken = self.taken + weights + (cache.num_pages + 1) * layout.page_bytes
        drafter_context = partial(
            DrafterContext,
            **facts,
            load_model=_SecondModels(engine, select.registry, taken).load,
        )
        drafter: Drafter | None = select.one("drafter", config.drafter, drafter_context)
        processors: tuple[LogitsProcessor, ...] = select.many("logits_processors", config.logits_processors, context)
        scheduler = select.one("scheduler", config.scheduler, context)
        executor_context = partial(
            ExecutorContext,
            **facts,
            checkpoint=model.checkpoint,
            weight_map=weight_map,
            layout=layout,
            num_pages=cache.num_page_ids if isinstance(cache, StorageMaker) else cache.num_pages,
            make_storage=cache.make_storage if isinstance(cache, StorageMaker) else None,
            num_host_pages=placed.num_host_pages,
            ops=ops,
            attention=attention,
            quantizers=quantizers,
            build_runner=runner.build,
            drafter=drafter,
            logits_processors=processors,
            config=as_dict(config),
            pinned_memory=str(placed.num_pages * _page_bytes(model.spec, placed)),
            build_stage=build_stage,
            build_choosing=build_choosing,
            build_demands=build_demands,
            selections=tuple(chosen.selection() for chosen in select.chosen),
        )
        executor = select.one("executor", config.executor, executor_context)
        self._check_frontends(engine)
        check_provided(select)
        return Parts(
            engine=engine,
            selections=tuple(chosen.selection() for chosen in select.chosen),
            checkpoint=model.checkpoint,
            tokenizer=model.tokenizer,
            spec=model.spec,
            weight_map=model.weight_map,
            weight_bytes=weights,
            layout=layout,
            num_pages=cache.num_pages,
            num_host_pages=placed.num_host_pages,
            num_ids=model.num_ids,
            ops=ops,
            attention=attention,
            cache=cache,
            scheduler=scheduler,
            executor=executor,
            quantizers=quantizers,
            drafter=drafter,
            logits_processors=processors,
            sampling=model.sampling,
            partition=partition,
            deprecated=tuple(map(str, select.registry.deprecated)),
            built=select.built,
            invariance=verified_invariance(kept_invariance(select, attention, ops_for, context), select, engine),
        )

    # --- the model --------------------------------------------------------------------------------------------------

    def _open_model(self) -> _Model:
        """Find the files, open them, read the model from their config, and check that its tensors are there."""
        model = self.config.model
        if not model.use:
            raise ConfigError(
                "model.use: no model is given; a name such as 'smollm2', a path or a hub id", field="model"
            )
        path = find_model(model.use, model.revision)
        loader_context = partial(LoaderContext, engine=self.config.engine, path=path)
        try:
            loader = self.select.one("loader", Choice(model.loader, model.options), loader_context)
        except UnfitError as error:
            raise CompositionError(f"{error} The model is {path}.", field=error.field) from None
        with blamed("open", self.select.of("loader")[0].offer):
            checkpoint: Checkpoint = loader.open()
            model_type = checkpoint.config.get("model_type")
        family = self._choose_family(checkpoint, model_type)
        with blamed("spec or weight_map", self.select.of("family")[0].offer):
            names = frozenset(checkpoint.tensors)
            spec = family.spec(checkpoint.config, names)
            weight_map = family.weight_map(spec, names)
        check_tensors(checkpoint, weight_map)
        with blamed("tokenizer", self.select.of("loader")[0].offer):
            definition = checkpoint.tokenizer()
        tokenizer = Tokenizer.from_spec(definition) if definition is not None else None
        with blamed("sampling", self.select.of("loader")[0].offer):
            sampling = SamplingDefaults(**recommended(model, checkpoint))
        return _Model(checkpoint, spec, weight_map, tokenizer, sampling)

    def _keep_stored(self, model: _Model, quantizers: Sequence[Quantizer]) -> _Model:
        """Mark the weights that stay in the format of their files."""
        how = self.config.model.weights
        if how == "dense" or (how == AUTO and not model.checkpoint.keeps_weights):
            return model
        with blamed("accepts", *(chosen.offer for chosen in self.select.of("quantizer"))):
            return evolve(model, weight_map=keep_stored(model.weight_map, model.checkpoint, quantizers))

    def _choose_family(self, checkpoint: Checkpoint, model_type: object) -> Any:
        """Choose the family that the config names, or the one whose key is the checkpoint's model type."""
        asked = self.config.model.family
        context = partial(ModelContext, engine=self.config.engine, config=checkpoint.config)
        if asked != AUTO:
            return self.select.one("family", Choice(asked), context)
        registry = self.select.registry
        families = registry.offers("family")
        if not isinstance(model_type, str) or model_type not in families:
            out = f" Plugins left out: {', '.join(registry.left_out)}." if registry.left_out else ""
            raise CheckpointError(
                f"{self.config.model.use}: its model type {shown(model_type)} is of no family that is installed"
                f"{nearest(str(model_type), families)}{out}"
            )
        return self.select.one("family", Choice(model_type), context, because=f"the model type is {model_type!r}")

    def _resolve_engine(self, spec: DecoderSpec) -> EngineOptions:
        """Settle what `auto` and None mean in `[engine]`."""
        engine = self.config.engine
        device = resolve_device(engine.device)
        if self.caps_length and engine.max_model_len is not None:
            engine = evolve(engine, max_model_len=min(engine.max_model_len, spec.max_len))
        if engine.max_model_len is not None and engine.max_model_len > spec.max_len:
            raise ConfigError(
                f"engine.max_model_len: {engine.max_model_len} is beyond the {spec.max_len} tokens that the model was "
                "trained for",
                field="engine.max_model_len",
            )
        return evolve(
            engine,
            device=device,
            dtype=resolve_dtype(engine.dtype, device),
            max_model_len=engine.max_model_len or spec.max_len,
            threads=resolve_threads(engine.threads),
        )

    def _share_out(self, model: _Model, engine: EngineOptions) -> tuple[Partition | None, EngineOptions]:
        """Ask the executor that the config names how ranks share the model; return that, and this rank's options."""
        choice = self.config.executor
        if choice.use == AUTO:  # is of this process
            return None, engine
        offer, options = self.select.asked("executor", choice)
        if offer.provider.partition is None:
            return None, engine
        with blamed("partition", offer):
            partition: Partition = offer.provider.partition(
                PartitionContext(options=options, engine=engine, spec=model.spec, num_ids=model.num_ids)
            )
        threads = engine.threads
        if self.config.engine.threads is None and threads is not None:
            threads = max(1, threads // partition.peers)
        return partition, evolve(engine, threads=threads, device=partition.device or engine.device)

    # --- ops and attention ------------------------------------------------------------------------------------------

    def _kernel_sets(self, parts: Sequence[Kernels]) -> list[tuple[str, Sequence[Kernel]]]:
        """Ask each set for its kernels; one that could never be chosen is a mistake of its author's."""
        sets: list[tuple[str, Sequence[Kernel]]] = []
        for chosen, part in zip(self.select.of("kernels"), parts, strict=True):
            with blamed("kernels", chosen.offer):
                kernels = tuple(part.kernels())
            for kernel in kernels:
                if not isinstance(kernel, Kernel):
                    raise PluginError(f"{titled(chosen.offer)}: kernels returned {shown(kernel)} among its kernels")
                if kernel.op not in NAMES:
                    raise PluginError(
                        f"{titled(chosen.offer)}: there is no op {kernel.op!r}.{did_you_mean(kernel.op, NAMES)}"
                    )
                if kernel.op in BY_FORMAT and not kernel.formats:
                    raise PluginError(f"{titled(chosen.offer)}: its kernel of {kernel.op!r} names no weight format")
            sets.append((chosen.key, kernels))
        return sets

    def _orders(self, attention: AttentionBackend, ops: Ops) -> list[str]:
        """Cache orders that attention and cache-write both read, best first."""
        chosen = self.select.of("attention")[0]
        with blamed("orders", chosen.offer):
            read = list(attention.orders)
        orders = [order for order in read if order in ops.orders()]
        if not orders:
            raise CompositionError(
                f"attention {chosen.key!r} reads caches in the orders {', '.join(read) or 'none'}, and the cache_write "
                f"of kernels {ops.choices['cache_write'].source!r} writes {', '.join(sorted(ops.orders())) or 'none'}; "
                f"kernels = 'torch' writes {', '.join(sorted(OPS['cache_write'].orders))}",
                field="attention",
            )
        return orders

    def _check_format(
        self, options: CacheOptions, attention: AttentionBackend, ops: Ops, context: Callable[..., PartContext]
    ) -> None:
        """The entry format must be read by attention and written by cache-write."""
        dtype = context().engine.dtype
        entry = dtype if options.format == AUTO else options.format
        chosen, writer = self.select.of("attention")[0], ops.choices["cache_write"]
        with blamed("formats", chosen.offer):
            read = list(attention.formats)
        if entry not in read:
            field = "cache.format" if options.format != AUTO else "engine.dtype"
            others = self.select.alternatives("attention", context, lambda other: entry in other.formats)
            ways = [f"attention = {key!r}" for key in others]
            if dtype in read:
                ways.append("cache.format = 'auto'")
            elif field == "engine.dtype":
                ways += [f"engine.dtype = {name!r}" for name in read if name in get_args(Dtype)]
            known = others or isinstance(getattr(torch, entry, None), torch.dtype)
            raise (CompositionError if known else ConfigError)(
                f"{field}: {entry!r} is not among the cache formats that attention {chosen.key!r} reads: "
                f"{', '.join(read)}; what would do: {' or '.join(ways) or 'another engine.dtype'}",
                field=field,
            )
        # A kernel writes what it is given, in the engine's dtype, unless it says that it converts.
        if entry != dtype and entry not in writer.kernel.formats:
            writes = ", ".join(sorted({dtype, *writer.kernel.formats}))
            raise CompositionError(
                f"cache.format: {entry!r} is not among what the cache_write of kernels {writer.source!r} writes: "
                f"{writes}; cache.format = 'auto' is the engine's dtype",
                field="cache.format",
            )

    # --- memory and the runner --------------------------------------------------------------------------------------

    def _place(
        self,
        context: Callable[..., PartContext],
        attention: AttentionBackend,
        ops: Ops,
        whole: DecoderSpec,
        orders: Sequence[str],
        weights: int,
    ) -> tuple[CacheAllocator, _ChosenRunner, CacheContext]:
        """Choose cache and runner with the first order that both read; where none is, raise the first refusal."""
        # Asked once: it differs from moment to moment, and all must count the same pages.
        partition = context().partition
        shares: Sequence[Share | None] = (None,) if partition is None else partition.shares
        free = max(0, free_memory(context().engine.device) - self.taken) // (
            1 if partition is None else partition.peers
        )
        refusal: UnfitError | None = None
        for order in orders:

            def cache_context(options: CacheOptions, order: str = order) -> CacheContext:
                base = context(options=options)
                self._check_format(options, attention, ops, context)
                share = None if partition is None else partition.share
                layout = lay_out(whole, options, order, base.engine.dtype, share)
                each = page_bytes(whole, options, order, base.engine.dtype, shares)
                return CacheContext(
                    options=options,
                    engine=base.engine,
                    spec=base.spec,
                    num_ids=base.num_ids,
                    tokenizer=base.tokenizer,
                    partition=partition,
                    layout=layout,
                    num_pages=num_pages(options, each, free - weights),
                    num_host_pages=num_host_pages(options, each),
                )

            try:
                cache, placed = self._choose_cache(cache_context, weights, free)
                runner_context = self._wrapping(
                    engine=placed.engine,
                    spec=placed.spec,
                    num_ids=placed.num_ids,
                    tokenizer=placed.tokenizer,
                    partition=partition,
                    layout=placed.layout,
                    ops=ops,
                    attention=attention,
                )
                runner = self.select.choose("runner", self.config.runner, runner_context)
            except UnfitError as error:
                refusal = refusal or error
                self.select.forget("cache", "runner")
            else:
                return cache, _ChosenRunner(runner, runner_context), placed
        assert refusal is not None, "orders is never empty"
        raise refusal

    def _wrapping(self, **facts: Any) -> Callable[..., RunnerContext]:
        """Return what makes a runner's context of these facts: one that can ask for another runner to wrap."""

        def inner(key: str, **weights: Any) -> InnerRunner:
            context_of = partial(RunnerContext, **facts, **weights)
            chosen = self.select.pick("runner", Choice(key), context_of, "runner.inner")
            return InnerRunner(provider=chosen.offer.provider, build=partial(chosen.build, context_of))

        def context(options: Any, **weights: Any) -> RunnerContext:
            return RunnerContext(**facts, options=options, **weights, inner=partial(inner, **weights))

        return context

    def _choose_cache(
        self, context_of: Callable[..., CacheContext], weights: int, free: int
    ) -> tuple[CacheAllocator, CacheContext]:
        """Choose and build the cache, and check that it and the weights have room."""
        chosen = self.select.choose("cache", self.config.cache, context_of)
        placed = context_of(options=chosen.options)
        # Before it is built: the books of a cache that is far too large are too large themselves.
        check_memory(placed, weights, free)
        check_swap(placed, self._free_on_host(placed, weights, free))
        cache: CacheAllocator = self.select.build(chosen, context_of)
        check_swaps(cache, chosen.offer.provider.key, placed)
        with blamed("capacity or num_pages", chosen.offer):
            check_capacity(cache, placed, room=free - weights)
            if cache.num_pages > placed.num_pages:
                raise PluginError(
                    f"{titled(chosen.offer)} says that it has {cache.num_pages} pages; it was given {placed.num_pages}"
                )
        return cache, placed

    def _free_on_host(self, placed: CacheContext, weights: int, free: int) -> int:
        """Return the bytes of host memory that are free for swapped pages, once weights and cache are there."""
        if placed.engine.device == "cpu":
            return free - weights - placed.num_pages * placed.layout.page_bytes
        partition = placed.partition
        return free_memory("cpu") // (1 if partition is None else len(partition.shares))

    # --- the whole --------------------------------------------------------------------------------------------------

    def _check_frontends(self, engine: EngineOptions) -> None:
        """Choose the ways in, which whoever serves builds around the engine."""

        def start_engine() -> EngineHandle:
            raise AssertionError("a frontend starts its engine when it serves")

        context = partial(FrontendContext, engine=engine, config=self.config, start_engine=start_engine)
        for choice in self.config.frontend:
            self.select.choose("frontend", choice, context)


def check_provided(select: Selector, bringers: Sequence[Chosen] | None = None) -> None:
    """A part that brings what another slot is for rules out naming a part there.

    Args:
        select: what was chosen.
        bringers: those to look at; None is all.

    Raises:
        CompositionError: a config names one.
    """
    for bringer in list(select.chosen) if bringers is None else bringers:
        for slot in bringer.offer.provider.provides:
            for ruled_out in select.of(slot):
                if ruled_out.asked_by == "config":
                    offers = select.registry.offers(bringer.slot)
                    others = [repr(key) for key, o in offers.items() if slot not in o.provider.provides]
                    also = f", or take {bringer.slot} {' or '.join(others)}" if others else ""
                    raise CompositionError(
                        f"{slot}: {ruled_out.key!r} is asked for, and {bringer.slot} {bringer.key!r} brings its "
                        f"own; leave {slot} to 'auto'{also}",
                        field=slot,
                    )
                select.note(ruled_out, f"{bringer.slot} {bringer.key!r} brings its own and does not use it")


def _page_bytes(whole: DecoderSpec, placed: CacheContext) -> int:
    """Return the bytes of a page on the rank where it takes most."""
    shares = (None,) if placed.partition is None else placed.partition.shares
    return page_bytes(whole, placed.options, placed.layout.order, placed.engine.dtype, shares)


@frozen
class _ChosenRunner:
    """The chosen runner, which executors build around the weights that they loaded."""

    chosen: Chosen
    context: Callable[..., RunnerContext]

    def build(self, weights: Weights) -> Any:
        return self.chosen.build(partial(self.context, weights=weights))
