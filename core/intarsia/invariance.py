"""How far a row's result is its own: the level that a composition keeps is the weakest promise of its parts."""

from __future__ import annotations

from collections.abc import Callable

from intarsia.errors import CompositionError, PluginError
from intarsia.ops import Ops
from intarsia.plugins import Offer
from intarsia.protocols import AttentionBackend, PartContext
from intarsia.selection import Chosen, Selector, blamed
from intarsia.types import INVARIANCE_ORDER, Dtype, EngineOptions, Invariance, Provider

#: The dtype in which kernels promise most.
_STRONGEST: Dtype = "float32"


def promises(ops: Ops, attention: AttentionBackend, runner: Provider, dtype: Dtype) -> dict[str, Invariance]:
    """Return what each op, and `attention`, promises of a row's result when the batch around it changes.

    A runner that promises a level of its own computes all by its own code: its promise is the only one.
    """
    if runner.invariance:
        return {"runner": runner.invariance.get(dtype, "numeric")}
    # Of attention that a runner brings without a word nothing is known.
    own = "attention" in runner.provides
    return ops.invariance(dtype) | {"attention": "numeric" if own else attention.invariance(dtype)}


def verified_invariance(kept: Invariance, select: Selector, engine: EngineOptions) -> Invariance:
    """Return what is kept of a level with drafts: under rejection tokens depend on them, and they on a step's costs.

    Raises:
        CompositionError: that is less than is demanded.
    """
    drafters = select.of("drafter")
    if not drafters or engine.verify == "equal":
        return kept
    if engine.invariance != "numeric":
        raise CompositionError(
            f"engine.verify: 'rejection' with drafter {drafters[0].key!r} keeps the distribution of an answer, not its "
            f"tokens, and engine.invariance = {engine.invariance!r} is demanded; what would do: "
            "engine.verify = 'equal' or drafter = 'none'",
            field="engine.verify",
        )
    return "numeric"


def kept_invariance(
    select: Selector,
    attention: AttentionBackend,
    ops_for: Callable[..., Ops],
    context: Callable[..., PartContext],
) -> Invariance:
    """Return the level that the whole keeps.

    Args:
        select: knows the attention backend and the runner that were chosen.
        attention: the backend.
        ops_for: the ops of a `dtype`.
        context: what an attention backend is built from; its `engine` says which level is demanded.

    Raises:
        CompositionError: it keeps less than is demanded; names every part that does, and what would do.
        PluginError: a part promises what is no level.
    """
    engine, chosen, runner = context().engine, select.of("attention")[0], select.of("runner")[0].offer

    def judge(backend: AttentionBackend, dtype: Dtype) -> tuple[Invariance, list[str]]:
        """Return the weakest promise, and who promises less than is demanded."""
        ops: Ops = ops_for(dtype=dtype)
        with blamed("invariance", chosen.offer):
            levels = promises(ops, backend, runner.provider, dtype)
        for name, level in levels.items():
            if level not in INVARIANCE_ORDER:
                raise PluginError(
                    f"{_who(name, ops, chosen, runner)} promises the invariance {level!r}, which is no level"
                )
        ranks = {name: INVARIANCE_ORDER.index(level) for name, level in levels.items()}
        short = [
            f"{_who(name, ops, chosen, runner)} keeps {levels[name]!r}"
            for name, rank in ranks.items()
            if rank < INVARIANCE_ORDER.index(engine.invariance)
        ]
        return INVARIANCE_ORDER[min(ranks.values())], short

    level, short = judge(attention, engine.dtype)
    if short:
        ways = [f"engine.invariance = {level!r}"]
        for dtype in dict.fromkeys((engine.dtype, _STRONGEST)):

            def keeps(other: AttentionBackend, dtype: Dtype = dtype) -> bool:
                return dtype in other.formats and not judge(other, dtype)[1]

            also = "" if dtype == engine.dtype else f" with engine.dtype = {dtype!r}"
            if also and keeps(attention):
                ways.append(f"engine.dtype = {dtype!r}")
            ways += [f"attention = {key!r}{also}" for key in select.alternatives("attention", context, keeps)]
        raise CompositionError(
            f"engine.invariance: {engine.invariance!r} is demanded, and in {engine.dtype} {', '.join(short)}; "
            f"what would do: {' or '.join(ways)}",
            field="engine.invariance",
        )
    return level


def _who(name: str, ops: Ops, attention: Chosen, runner: Offer) -> str:
    """Name who makes a promise."""
    if name == "runner":
        return f"runner {runner.provider.key!r}"
    return f"attention {attention.key!r}" if name == "attention" else f"{name} of kernels {ops.choices[name].source!r}"
