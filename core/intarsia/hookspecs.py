"""The hooks, in the order of an engine's life.

The grammar is the contract: `provide_` returns providers, `check_` raises, a participle observes. Hooks choose parts;
parts do the work: no hook runs per token or per layer. The `provide_` hooks share one signature and are made from the
table `KINDS` below. Importing this module needs neither torch nor any plugin.

A plugin is a module (or object) under the entry-point group `intarsia` that implements any of them::

    from intarsia.hookspecs import hookimpl
    from intarsia.types import Provider

    @hookimpl
    def provide_schedulers():
        return [Provider(key="mine", summary="shortest first", build=build_mine, requires=("cache",))]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, overload

import pluggy
from attrs import frozen

from intarsia import protocols
from intarsia.deprecations import old_name
from intarsia.types import EngineConfig, Output, Provider, StepResult

if TYPE_CHECKING:
    from intarsia.protocols import EngineHandle, Parts

#: The pluggy project name and the entry-point group.
PROJECT = "intarsia"

hookspec = pluggy.HookspecMarker(PROJECT)
_mark = pluggy.HookimplMarker(PROJECT)
_Function = TypeVar("_Function", bound=Callable[..., Any])


@overload
def hookimpl(function: _Function, *, api: int | None = None, **options: Any) -> _Function: ...
@overload
def hookimpl(*, api: int | None = None, **options: Any) -> Callable[[_Function], _Function]: ...


def hookimpl(function: Any = None, *, api: int | None = None, **options: Any) -> Any:
    """Mark a function as an implementation of the hook of its name.

    Args:
        function: it.
        api: version of the hook that it was written for, of the hooks that check or observe; left out, 1. What a
            `provide_` hook returns says so itself, in `Provider.api`.
        options: pluggy's, such as `tryfirst=True`.
    """

    def mark(implementation: Any) -> Any:
        if api is not None:
            implementation.intarsia_api = api
        return _mark(**options)(implementation)

    return mark if function is None else mark(function)


@frozen(kw_only=True)
class Kind:
    """One kind of part: a slot of the config and the hook that fills it.

    Attributes:
        slot: the config's section; for loaders and families, an option of `[model]`.
        hook: the hook's name.
        what: what such a part is, in one line.
        part: the protocol that a built part has.
        context: what `fit` and `build` receive.
        many: the slot holds an ordered list of parts.
        optional: the slot may be empty, and `auto` leaves it so.
        api: version of this hook; a provider that was written for another is refused.
        then: what happens with the part.
        example: a key and a line of config.
    """

    slot: str
    hook: str
    what: str
    part: type
    context: type
    then: str
    example: str
    many: bool = False
    optional: bool = False
    api: int = 1


KINDS: tuple[Kind, ...] = (
    Kind(
        slot="loader",
        hook="provide_loaders",
        what="checkpoint formats: model files -> config, tensors, tokenizer",
        part=protocols.Loader,
        context=protocols.LoaderContext,
        then="The loader that fits the files is opened; its headers are read before, its weights after composition.",
        example='model = { use = "smollm2", loader = "gguf" }',
    ),
    Kind(
        slot="family",
        hook="provide_models",
        what="model families: a checkpoint's config -> DecoderSpec; the key is Hugging Face's `model_type`",
        part=protocols.ModelFamily,
        context=protocols.ModelContext,
        then="Its spec describes the model to every other part; its weight map says which tensors are read.",
        example='model = { use = "smollm2", family = "llama" }',
    ),
    Kind(
        slot="quantizer",
        hook="provide_quantizers",
        what="weight formats: int8, int4, 2:4 sparse, and chains of them",
        part=protocols.Quantizer,
        context=protocols.PartContext,
        then="Each weight that it accepts is quantized right after it is read, in the order of the list.",
        example='quantizer = { use = "sparse24", values = "int8" }',
        many=True,
        optional=True,
    ),
    Kind(
        slot="kernels",
        hook="provide_kernels",
        what="implementations of named ops for a device, dtype and weight format",
        part=protocols.Kernels,
        context=protocols.PartContext,
        then="For each op the first kernel in the list that fits is taken; the torch reference stands behind them all.",
        example='kernels = ["cpu", "torch"]',
        many=True,
    ),
    Kind(
        slot="attention",
        hook="provide_attention_backends",
        what="attention over the cache",
        part=protocols.AttentionBackend,
        context=protocols.PartContext,
        then="It prepares once a step and attends once a layer; its cache orders help to decide the cache's layout.",
        example='attention = "sdpa"',
    ),
    Kind(
        slot="cache",
        hook="provide_cache_allocators",
        what="where keys and values live",
        part=protocols.CacheAllocator,
        context=protocols.CacheContext,
        then="The scheduler reserves and releases pages through it; the engine commits accepted tokens to it.",
        example='cache = { use = "contiguous", page_size = 32, memory = "2GiB" }',
    ),
    Kind(
        slot="runner",
        hook="provide_runners",
        what="ways to run layers: eager, one fused native step, a CUDA graph around another",
        part=protocols.Runner,
        context=protocols.RunnerContext,
        then="Built by each rank's executor once its weights are loaded; runs every step.",
        example='runner = "eager"',
    ),
    Kind(
        slot="drafter",
        hook="provide_drafters",
        what="cheap guesses for speculation",
        part=protocols.Drafter,
        context=protocols.DrafterContext,
        then="Asked after each step for the rows that want drafts; the next step verifies what it proposed.",
        example='drafter = "ngram"',
        optional=True,
    ),
    Kind(
        slot="logits_processors",
        hook="provide_logits_processors",
        what="pure functions of (request, ids before this position, drafts included, logits row)",
        part=protocols.LogitsProcessor,
        context=protocols.PartContext,
        then="Run in order on the rows whose request they apply to, before temperature and filters.",
        example='logits_processors = ["grammar"]',
        many=True,
        optional=True,
    ),
    Kind(
        slot="scheduler",
        hook="provide_schedulers",
        what="who runs in the next step",
        part=protocols.Scheduler,
        context=protocols.PartContext,
        then="Asked for a plan before each step and told its outcome after.",
        example='scheduler = { use = "static", max_batch = 8 }',
    ),
    Kind(
        slot="executor",
        hook="provide_executors",
        what="where plans run: this process, tensor / pipeline / sequence parallel, a cluster",
        part=protocols.Executor,
        context=protocols.ExecutorContext,
        then="Started once; steps are submitted to it and collected from it.",
        example='executor = "local"',
    ),
    Kind(
        slot="frontend",
        hook="provide_frontends",
        what="ways in: ZeroMQ, HTTP",
        part=protocols.Frontend,
        context=protocols.FrontendContext,
        then="Serves the engine until it is told to stop.",
        example='frontend = "zmq"',
        many=True,
        optional=True,
    ),
    Kind(
        slot="commands",
        hook="provide_commands",
        what="CLI commands; the key is the command's name",
        part=protocols.Command,
        context=protocols.CommandContext,
        then="Listed by `intarsia --help` with its summary, built when it is called.",
        example="intarsia bench",
        many=True,
        optional=True,
    ),
)


def _an(name: str) -> str:
    """Return a class's name behind its indefinite article."""
    return f"{'an' if name[0] in 'AEIO' else 'a'} {name}"


def _provide(kind: Kind) -> Callable[[], Iterable[Provider]]:
    """Make the hook spec of one kind, docstring included."""

    def provide() -> Iterable[Provider]:
        raise AssertionError("a hook spec is never called")

    provide.__name__ = provide.__qualname__ = kind.hook
    provide.__doc__ = (
        f"Offer {kind.what}.\n\n"
        f"Called once, when plugins are collected, without arguments. Returns providers whose `fit` and `build`\n"
        f"take {_an(kind.context.__name__)} and whose `build` makes {_an(kind.part.__name__)}.\n{kind.then}\n\n"
        f"Example: `{kind.example}`"
    )
    return hookspec(provide)


globals().update({kind.hook: _provide(kind) for kind in KINDS})


@hookspec
def check_composition(config: EngineConfig, parts: Parts) -> None:
    """Refuse parts that do not fit together.

    Called once an engine, after every part is chosen and before weights load, with the config and the parts. Returns
    nothing; raises CompositionError that names both sides and the nearest composition that works, and then no engine
    is made.

    Example: a fused runner that cannot read int4 weights names itself, the quantizer and `runner = "eager"`.
    """


@hookspec
def engine_started(engine: EngineHandle, parts: Parts) -> None:
    """Observe that an engine is ready.

    Called once an engine, after weights are loaded and warm-up is done. What it returns is ignored; an observer that
    raises is logged and never asked again.

    Example: a metrics plugin notes the model and the layout.
    """


@hookspec
def step_finished(result: StepResult, outputs: tuple[Output, ...], seconds: float) -> None:
    """Observe a step: what the executor returned, what the engine made of it, how long both took.

    Called after every step that ran rows; costs nothing where nobody implements it. What it returns is ignored; an
    observer that raises is logged and never asked again.

    Example: a dashboard counts tokens a second.
    """


@hookspec
def request_finished(output: Output) -> None:
    """Observe the last output of a choice, with its usage and timings.

    Called once a choice, whatever its finish_reason. What it returns is ignored; an observer that raises is logged and
    never asked again.

    Example: a tracer closes the request's span.
    """


@hookspec
def engine_stopping(engine: EngineHandle) -> None:
    """Observe that an engine is about to stop.

    Called once an engine, before its executor stops. What it returns is ignored; an observer that raises is logged and
    never asked again.

    Example: a metrics plugin writes its last figures.
    """


#: Hooks that observe.
OBSERVERS: tuple[str, ...] = ("engine_started", "step_finished", "request_finished", "engine_stopping")

#: The version of every hook. One that gains an argument, a context that gains a field and a protocol that gains what a
#: part need not have keep theirs: what was written for it before goes on working.
API: Mapping[str, int] = {
    **{kind.hook: kind.api for kind in KINDS},
    "check_composition": 1,
    **dict.fromkeys(OBSERVERS, 1),
}


def kind_of(slot: str) -> Kind:
    """Return the kind that fills a slot; KeyError where there is none."""
    return {kind.slot: kind for kind in KINDS}[slot]


def hook_docs() -> dict[str, str]:
    """Return every hook's name and docstring, in the order of an engine's life."""
    names = [kind.hook for kind in KINDS] + ["check_composition", *OBSERVERS]
    return {name: str(globals()[name].__doc__) for name in names}


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        return old_name(__name__, name)
