"""config + providers -> Parts. Every check is made here, before weights load.

Parts are chosen in the order of `KINDS`, each knowing the model and the parts before it. Nothing falls back silently:
each choice is recorded with its reason, for `explain` and for clients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from attrs import Factory, define, evolve, frozen

from intarsia.config import structure
from intarsia.errors import CheckpointError, CompositionError, ConfigError, did_you_mean
from intarsia.hookspecs import kind_of
from intarsia.machine import free_memory, resolve_device, resolve_dtype, resolve_threads
from intarsia.models.weights import Weights, check_tensors, num_parameters
from intarsia.ops import Ops, resolve
from intarsia.plugins import Offer, Registry
from intarsia.protocols import (
    AttentionBackend,
    CacheAllocator,
    CacheContext,
    Context,
    ExecutorContext,
    Kernels,
    LoaderContext,
    ModelContext,
    PartContext,
    Parts,
    Quantizer,
    Runner,
    RunnerContext,
    Selection,
)
from intarsia.references import find_model
from intarsia.text import Tokenizer
from intarsia.types import (
    AUTO,
    INVARIANCE_ORDER,
    NONE,
    CacheGroup,
    CacheLayout,
    CacheOptions,
    Choice,
    DecoderSpec,
    EngineConfig,
    EngineOptions,
    Fit,
    Invariance,
    Unfit,
    WeightMap,
    parse_bytes,
)

#: Makes the context of a kind of part, given (by keyword) the `options` of the one that is tried.
_ContextOf = Callable[..., Context]

#: Of the memory that is free beside the weights, how much the cache takes where no size is given.
_CACHE_SHARE = 0.5


def compose(config: EngineConfig, registry: Registry) -> Parts:
    """Choose and check every part of an engine.

    Raises:
        ConfigError: a key, an option or a value is wrong.
        ModelNotFoundError, CheckpointError: the model's files are not there, or not right.
        CompositionError: parts do not fit the model, the machine or each other.
    """
    parts = _Composer(config, registry).compose()
    registry.hook.check_composition(config=config, parts=parts)
    return parts


@frozen
class _Candidate:
    """A part that may be chosen: its options as an instance, and what it says of its fit."""

    offer: Offer
    options: Any
    fit: Fit | Unfit | ConfigError

    @property
    def key(self) -> str:
        return self.offer.provider.key

    @property
    def refusal(self) -> str:
        assert not isinstance(self.fit, Fit)
        return f"{self.key}: {self.fit.reason if isinstance(self.fit, Unfit) else self.fit}"


@define
class _Composer:
    config: EngineConfig
    registry: Registry
    selections: list[Selection] = Factory(list)

    def compose(self) -> Parts:
        checkpoint, spec, weight_map = self._open_model()
        check_tensors(checkpoint, weight_map)
        definition = checkpoint.tokenizer()
        tokenizer = Tokenizer.from_spec(definition) if definition is not None else None
        engine = self._resolve_engine(spec)
        context: Callable[..., PartContext] = partial(PartContext, engine=engine, spec=spec)

        quantizers: tuple[Quantizer, ...] = self._many("quantizer", self.config.quantizer, context)
        kernels: tuple[Kernels, ...] = self._many("kernels", self.config.kernels, context)
        ops = self._resolve_ops(kernels, quantizers, engine)
        attention: AttentionBackend = self._one("attention", self.config.attention, context)
        orders = self._orders(attention, ops)
        weight_bytes = _weight_bytes(weight_map, quantizers, engine)

        def cache_context(options: Any, order: str = orders[0]) -> CacheContext:
            layout = _layout(spec, options, order, engine.dtype, attention)
            num_pages = _num_pages(options, layout, engine, weight_bytes)
            return CacheContext(options=options, engine=engine, spec=spec, layout=layout, num_pages=num_pages)

        cache: CacheAllocator = self._one("cache", self.config.cache, cache_context)
        cache_options = self.selections[-1].options
        runner, build_runner, order = self._choose_runner(
            orders, lambda order: cache_context(cache_options, order).layout, context, ops, attention
        )
        if "attention" in runner.provider.provides and self.config.attention.use != AUTO:
            raise CompositionError(
                f"attention: {self.config.attention.use!r} is asked for, and runner {runner.provider.key!r} brings its "
                "own; leave attention to 'auto', or take runner 'eager'",
                field="attention",
            )
        placed = cache_context(cache_options, order)
        self._check_room(cache, placed)
        drafter = None
        if self.config.drafter.use not in (AUTO, NONE):
            drafter = self._one("drafter", self.config.drafter, context)
        processors = self._many("logits_processors", self.config.logits_processors, context)
        scheduler = self._one("scheduler", self.config.scheduler, partial(context, parts={"cache": cache}))
        num_ids = min(spec.vocab_size, tokenizer.vocab_size) if tokenizer is not None else spec.vocab_size
        executor_context = partial(
            ExecutorContext,
            engine=engine,
            spec=spec,
            checkpoint=checkpoint,
            weight_map=weight_map,
            layout=placed.layout,
            num_pages=placed.num_pages,
            num_ids=num_ids,
            attention=attention,
            quantizers=quantizers,
            build_runner=build_runner,
            drafter=drafter,
            logits_processors=processors,
        )
        executor = self._one("executor", self.config.executor, executor_context)
        return Parts(
            engine=engine,
            selections=tuple(self.selections),
            checkpoint=checkpoint,
            tokenizer=tokenizer,
            spec=spec,
            weight_map=weight_map,
            weight_bytes=weight_bytes,
            layout=placed.layout,
            num_pages=placed.num_pages,
            num_ids=num_ids,
            ops=ops,
            attention=attention,
            cache=cache,
            scheduler=scheduler,
            executor=executor,
            quantizers=quantizers,
            drafter=drafter,
            logits_processors=processors,
            invariance=self._invariance(ops, attention, engine),
        )

    # --- choosing ---------------------------------------------------------------------------------------------------

    def _one(self, slot: str, choice: Choice, context_of: _ContextOf) -> Any:
        """Choose, record and build the part of a slot."""
        chosen = self._choose(slot, choice, context_of)
        return chosen.offer.provider.build(context_of(options=chosen.options))

    def _many(self, slot: str, choices: Sequence[Choice], context_of: _ContextOf) -> tuple[Any, ...]:
        return tuple(self._one(slot, choice, context_of) for choice in choices)

    def _choose(self, slot: str, choice: Choice, context_of: _ContextOf) -> _Candidate:
        """Choose the part of a slot, and record why."""
        if choice.use != AUTO:
            chosen = self._try(self.registry.find(slot, choice.use), choice, context_of)
            if isinstance(chosen.fit, ConfigError):
                raise chosen.fit
            if isinstance(chosen.fit, Unfit):
                others = [self._try(o, Choice(), context_of) for o in self.registry.offers(slot).values()]
                fitting = sorted(c.key for c in others if isinstance(c.fit, Fit))
                raise CompositionError(
                    f"{_path(slot)}: {choice.use!r} cannot be used here: {chosen.fit.reason}. "
                    f"What fits: {', '.join(fitting) or 'nothing that is installed'}.",
                    field=_path(slot),
                )
            return self._record(chosen, "config", chosen.fit.reason)
        candidates = [self._try(offer, choice, context_of) for offer in self.registry.offers(slot).values()]
        return self._record(*self._best(slot, candidates))

    def _try(self, offer: Offer, choice: Choice, context_of: _ContextOf) -> _Candidate:
        """Ask one part whether it takes these options and fits."""
        provider, path = offer.provider, _path(offer.kind.slot)
        try:
            options: Any = structure(provider.options, choice.options, path, owner=repr(provider.key))
        except ConfigError as error:
            return _Candidate(offer, None, error)
        return _Candidate(offer, options, provider.fit(context_of(options=options)))

    def _best(self, slot: str, candidates: Sequence[_Candidate]) -> tuple[_Candidate, str, str]:
        """Return the candidate of the highest rank, that `auto` chose it, and why."""
        fitting = [c for c in candidates if isinstance(c.fit, Fit)]
        refusals = [c.refusal for c in candidates if not isinstance(c.fit, Fit)]
        if not fitting:
            wrong_options = [c.fit for c in candidates if isinstance(c.fit, ConfigError)]
            if wrong_options:
                raise wrong_options[0]
            raise CompositionError(
                f"{_path(slot)}: nothing that is installed fits. {'; '.join(refusals) or 'No plugin offers one'}.",
                field=_path(slot),
            )

        def rank(candidate: _Candidate) -> int:
            assert isinstance(candidate.fit, Fit)
            return candidate.fit.rank

        fitting.sort(key=rank, reverse=True)
        best = fitting[0]
        tied = [c.key for c in fitting if rank(c) == rank(best)]
        if len(tied) > 1:
            raise CompositionError(
                f"{_path(slot)}: {' and '.join(map(repr, tied))} fit equally well; name one of them", field=_path(slot)
            )
        assert isinstance(best.fit, Fit)
        passed = [f"{c.key} ranks {rank(c)}" for c in fitting[1:]] + refusals
        reason = best.fit.reason or f"ranks {rank(best)}"
        return best, AUTO, f"{reason}; over {', '.join(passed)}" if passed else f"{reason}; the only one"

    def _record(self, chosen: _Candidate, asked_by: str, reason: str) -> _Candidate:
        plugin = chosen.offer.plugin
        self.selections.append(
            Selection(
                slot=chosen.offer.kind.slot,
                provider=chosen.offer.provider,
                plugin=plugin.name,
                distribution=plugin.distribution,
                version=plugin.version,
                asked_by=asked_by,
                reason=reason,
                options=chosen.options,
            )
        )
        return chosen

    # --- the model --------------------------------------------------------------------------------------------------

    def _open_model(self) -> tuple[Any, DecoderSpec, WeightMap]:
        """Find the files, open them, and read the model from their config."""
        model = self.config.model
        if not model.use:
            raise ConfigError(
                "model.use: no model is given; a name such as 'smollm2', a path or a hub id", field="model"
            )
        path = find_model(model.use, model.revision)
        loader = self._one(
            "loader",
            Choice(model.loader, model.options),
            partial(LoaderContext, engine=self.config.engine, path=path),
        )
        checkpoint = loader.open()
        model_type = checkpoint.config.get("model_type")
        families = self.registry.offers("family")
        if model.family == AUTO and model_type not in families:
            raise CheckpointError(
                f"model type {model_type!r} of {path} is of no family that is installed."
                f"{did_you_mean(str(model_type), families)}"
            )
        family = self._one(
            "family",
            Choice(model.family if model.family != AUTO else str(model_type)),
            partial(ModelContext, engine=self.config.engine, config=checkpoint.config),
        )
        if model.family == AUTO:
            self.selections[-1] = evolve(self.selections[-1], asked_by=AUTO, reason=f"the model type is {model_type!r}")
        spec = family.spec(checkpoint.config, frozenset(checkpoint.tensors))
        return checkpoint, spec, family.weight_map(spec)

    def _resolve_engine(self, spec: DecoderSpec) -> EngineOptions:
        """Settle what `auto` and None mean in `[engine]`."""
        engine = self.config.engine
        device = resolve_device(engine.device)
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

    # --- the step ---------------------------------------------------------------------------------------------------

    def _resolve_ops(self, kernels: Sequence[Kernels], quantizers: Sequence[Quantizer], engine: EngineOptions) -> Ops:
        keys = [s.provider.key for s in self.selections if s.slot == "kernels"]
        sets = [(key, part.kernels()) for key, part in zip(keys, kernels, strict=True)]
        return resolve(sets, engine.dtype, ["dense", *(q.format for q in quantizers)])

    def _orders(self, attention: AttentionBackend, ops: Ops) -> list[str]:
        """Cache orders that attention and cache-write both read, best first."""
        orders = [order for order in attention.orders if order in ops.orders()]
        if not orders:
            raise CompositionError(
                f"attention {self.selections[-1].provider.key!r} reads caches in the orders "
                f"{', '.join(attention.orders)}, and the cache_write kernel of {ops.choices['cache_write'].source!r} "
                f"writes {', '.join(sorted(ops.orders()))}; kernels = 'torch' writes every order",
                field="attention",
            )
        return orders

    def _choose_runner(
        self,
        orders: Sequence[str],
        layout_of: Callable[[str], CacheLayout],
        context: Callable[..., PartContext],
        ops: Ops,
        attention: AttentionBackend,
    ) -> tuple[Selection, Callable[[Weights], Runner], str]:
        """Choose the runner with the first cache order that it reads."""
        base = context()
        for order in orders:

            def runner_context(options: Any, weights: Weights | None = None, order: str = order) -> RunnerContext:
                return RunnerContext(
                    options=options,
                    engine=base.engine,
                    spec=base.spec,
                    layout=layout_of(order),
                    ops=ops,
                    attention=attention,
                    weights=weights or {},
                )

            try:
                chosen = self._choose("runner", self.config.runner, runner_context)
            except CompositionError:
                if order == orders[-1]:
                    raise
                continue
            build, options = chosen.offer.provider.build, chosen.options
            return self.selections[-1], partial(_build_runner, build, partial(runner_context, options)), order
        raise AssertionError("orders is never empty")

    def _check_room(self, cache: CacheAllocator, context: CacheContext) -> None:
        """The cache must hold at least one sequence of max_model_len."""
        max_len = context.engine.max_model_len
        assert max_len is not None
        if cache.capacity(max_len):
            return
        layout = context.layout
        raise CompositionError(
            f"the cache has room for {context.num_pages * layout.page_size} tokens "
            f"({context.num_pages * layout.page_bytes} bytes), and one sequence of engine.max_model_len = {max_len} "
            f"takes {max_len * layout.token_bytes} bytes; lower engine.max_model_len or raise cache.memory",
            field="cache.memory",
        )

    def _invariance(self, ops: Ops, attention: AttentionBackend, engine: EngineOptions) -> Invariance:
        """The whole keeps the weakest promise of its parts; refuse a composition that keeps less than is demanded."""
        promises = ops.invariance(engine.dtype) | {"attention": attention.invariance(engine.dtype)}
        weakest = min(promises, key=lambda name: INVARIANCE_ORDER.index(promises[name]))
        level = promises[weakest]
        if INVARIANCE_ORDER.index(level) < INVARIANCE_ORDER.index(engine.invariance):
            hint = "; engine.dtype = 'float32' keeps more" if engine.dtype != "float32" else ""
            raise CompositionError(
                f"engine.invariance: {engine.invariance!r} is demanded, and {weakest} keeps {level!r} in "
                f"{engine.dtype}{hint}",
                field="engine.invariance",
            )
        return level


def _build_runner(
    build: Callable[[Any], Runner], context_of: Callable[[Weights], RunnerContext], weights: Weights
) -> Runner:
    return build(context_of(weights))


def _path(slot: str) -> str:
    """Where a slot's choice stands in a config."""
    return f"model.{slot}" if slot in ("loader", "family") else kind_of(slot).slot


def _layout(
    spec: DecoderSpec, options: CacheOptions, order: str, dtype: str, attention: AttentionBackend
) -> CacheLayout:
    """Lay the cache out: layers with equal heads and window share page tables."""
    entry = dtype if options.format == AUTO else options.format
    if entry not in attention.formats:
        raise ConfigError(
            f"cache.format: {entry!r} is not among what attention reads: {', '.join(attention.formats)}",
            field="cache.format",
        )
    members: dict[tuple[int, int, int | None], list[int]] = {}
    for index, layer in enumerate(spec.layers):
        heads = layer.attention
        members.setdefault((heads.num_kv_heads, heads.head_dim, heads.window), []).append(index)
    return CacheLayout(
        order=order,
        format=entry,
        entry_bytes=getattr(torch, entry).itemsize,
        page_size=options.page_size,
        groups=tuple(
            CacheGroup(
                kind="full" if window is None else "window",
                layers=tuple(layers),
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                window=window,
            )
            for (num_kv_heads, head_dim, window), layers in members.items()
        ),
    )


def _weight_bytes(weight_map: WeightMap, quantizers: Sequence[Quantizer], engine: EngineOptions) -> int:
    """Bytes of all weights as they will be in memory."""
    itemsize: int = getattr(torch, engine.dtype).itemsize
    total = num_parameters(weight_map) * itemsize
    for name, source in weight_map.tensors.items():
        dense = torch.Size(source.shape).numel() * itemsize
        for quantizer in quantizers:
            if len(source.shape) == 2 and quantizer.accepts(name, source.shape):
                total += quantizer.num_bytes(name, source.shape) - dense
                dense = quantizer.num_bytes(name, source.shape)
    return total


def _num_pages(options: CacheOptions, layout: CacheLayout, engine: EngineOptions, weight_bytes: int) -> int:
    """How many pages the cache's memory holds: what was given, or a share of what is free beside the weights."""
    if options.memory == AUTO:
        memory = int(max(0, free_memory(engine.device) - weight_bytes) * _CACHE_SHARE)
    else:
        memory = parse_bytes(options.memory)
    return memory // layout.page_bytes
