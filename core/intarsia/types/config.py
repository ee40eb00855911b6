"""What an engine is made of: the config that asks for parts and the providers that offer them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

from attrs import Factory, field, frozen
from attrs.validators import ge, optional

#: The key that leaves a choice to composition, and the one that leaves an optional slot empty.
AUTO = "auto"
NONE = "none"

Dtype: TypeAlias = Literal["auto", "float32", "float16", "bfloat16"]
Invariance: TypeAlias = Literal["bitwise", "neighbours", "numeric"]
Verify: TypeAlias = Literal["equal", "rejection"]
#: From the weakest promise to the strongest.
INVARIANCE_ORDER: tuple[Invariance, ...] = ("numeric", "neighbours", "bitwise")


@frozen
class Choice:
    """What a config says of one slot: which part, and the part's own options as written."""

    use: str = AUTO
    options: Mapping[str, Any] = Factory(dict)


@frozen(kw_only=True)
class ModelChoice:
    """Which model: `use` is a name, a path or a hub id; `loader` and `family` are keys of parts.

    Attributes:
        use: a known name (`smollm2`), a path to a file or folder, or a hub id (`owner/name`).
        loader: key of the loader; auto is the one that fits the files.
        family: key of the model family; auto is the `model_type` that the files say.
        revision: branch, tag or commit, for a hub id.
        generation_config: whether requests that do not say take the sampling that the model's files recommend.
        weights: how weights that the files store in few bits are kept: `stored`, as they are; `dense`, as floats; auto
            is what the loader says.
        options: options of the loader.
    """

    use: str = ""
    loader: str = AUTO
    family: str = AUTO
    revision: str | None = None
    generation_config: bool = True
    weights: Literal["auto", "dense", "stored"] = "auto"
    options: Mapping[str, Any] = Factory(dict)


@frozen(kw_only=True)
class PluginsOptions:
    """Which plugins may take part, by entry-point name.

    Attributes:
        allow: only these; an empty list is the bare core; None is every plugin that is installed.
        block: never these.
    """

    allow: tuple[str, ...] | None = None
    block: tuple[str, ...] = ()


@frozen(kw_only=True)
class EngineOptions:
    """`[engine]`: what all parts share."""

    #: where the model runs: auto, cpu, cuda, cuda:1
    device: str = AUTO
    #: of weights and activations; auto is bfloat16 where the device has bf16 dot products, else float32
    dtype: Dtype = "auto"
    #: prompt and answer together, in tokens; None is what the model was trained for
    max_model_len: int | None = field(default=None, validator=optional(ge(1)))
    #: CPU threads; None is one a physical core
    threads: int | None = field(default=None, validator=optional(ge(1)))
    #: the least promise of equal tokens that the composition must keep
    invariance: Invariance = "numeric"
    #: how drafts are verified: equal never changes the output, rejection keeps its distribution and accepts more
    verify: Verify = "equal"
    #: where requests without a seed take theirs from; None is the operating system
    seed: int | None = None
    #: the least severe messages that are logged
    log_level: Literal["debug", "info", "warning", "error"] = "warning"
    plugins: PluginsOptions = Factory(PluginsOptions)


@frozen(kw_only=True)
class EngineConfig:
    """A whole config: one field a section. Slots that hold several parts, in order, are tuples."""

    model: ModelChoice = Factory(ModelChoice)
    engine: EngineOptions = Factory(EngineOptions)
    cache: Choice = Factory(Choice)
    scheduler: Choice = Factory(Choice)
    attention: Choice = Factory(Choice)
    quantizer: tuple[Choice, ...] = ()
    drafter: Choice = Factory(Choice)
    kernels: tuple[Choice, ...] = (Choice(),)
    runner: Choice = Factory(Choice)
    executor: Choice = Factory(Choice)
    frontend: tuple[Choice, ...] = ()
    logits_processors: tuple[Choice, ...] = ()


@frozen
class NoOptions:
    """The options of a part that has none."""


@frozen
class Fit:
    """A part that can serve a context. `auto` takes the highest rank; a tie is an error.

    Ranks by custom: 10 plain and always right, 50 the usual choice, 90 made for exactly this device or model.
    """

    rank: int
    reason: str = ""


@frozen
class Unfit:
    """A part that cannot serve a context, and why: the reason is shown to users."""

    reason: str


def lazy(where: str) -> Callable[[Any], Any]:
    """Return a function that calls `module:name`, which is imported at the first call.

    For a provider's `fit` and `build`, so that listing plugins imports nothing heavy:
    `Provider(key="mine", summary="...", build=lazy("my_package.scheduler:build"))`.
    """
    module, _, name = where.partition(":")

    def call(context: Any) -> Any:
        return getattr(importlib.import_module(module), name)(context)

    call.__qualname__ = call.__name__ = where
    return call


def _always(_: object) -> Fit:
    return Fit(10)


@frozen(kw_only=True)
class Provider:
    """A plugin's offer of one part.

    Attributes:
        key: what a config says to use it; unique in its slot.
        summary: one line for listings.
        build: makes the part; called once an engine, only for the part that was chosen, and again where composition
            tries another cache layout or looks for what would work. May import what is heavy.
        fit: whether the part can serve a context, and how well. Cheap; imports nothing heavy where it can be helped.
        options: the part's own attrs class; a section's keys are checked against it.
        requires: slots whose parts `build` finds in `context.parts`. They are composed before this one.
        provides: what else it brings. A runner that `provides=("attention",)` rules out naming a backend.
        invariance: of a runner that computes by code of its own: what it promises of a row's result when the batch
            around the row changes, by dtype name. Empty: the promises of what it calls hold, the ops and the attention.
        parallel: of a runner: what it can do where ranks share a model: the collective ops that it calls, see
            `intarsia.ops.COLLECTIVES`, and `stages` if it runs layers without the embeddings before or the head behind.
            Where a sharing needs more than that, the runner is refused.
        partition: of an executor over several ranks: says what each of them holds. Takes a `PartitionContext`,
            returns a `Partition`; called before any other part is chosen.
        api: version of the hook that it was written for.
    """

    key: str
    summary: str
    build: Callable[[Any], Any]
    fit: Callable[[Any], Fit | Unfit] = _always
    options: type = NoOptions
    requires: tuple[str, ...] = ()
    provides: tuple[str, ...] = ()
    invariance: Mapping[str, Invariance] = Factory(dict)
    parallel: frozenset[str] = frozenset()
    partition: Callable[[Any], Any] | None = None
    api: int = 1
