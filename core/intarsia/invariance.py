"""How far a row's result is its own: the level that a composition keeps is the weakest promise of its parts."""

from __future__ import annotations

from collections.abc import Callable

from intarsia.errors import CompositionError, PluginError
from intarsia.ops import Ops
from intarsia.protocols import AttentionBackend
from intarsia.selection import Chosen, blamed
from intarsia.types import INVARIANCE_ORDER, Dtype, EngineOptions, Invariance, Provider


def promises(ops: Ops, attention: AttentionBackend, runner: Provider, dtype: Dtype) -> dict[str, Invariance]:
    """Return what each op, and `attention`, promises of a row's result when the batch around it changes."""
    # No runner can promise anything yet, so nothing is known of the attention that one brings.
    own = "attention" in runner.provides
    return ops.invariance(dtype) | {"attention": "numeric" if own else attention.invariance(dtype)}


def kept_invariance(
    chosen: Chosen,
    attention: AttentionBackend,
    runner: Provider,
    ops_for: Callable[..., Ops],
    engine: EngineOptions,
) -> Invariance:
    """Return the level that the whole keeps.

    Args:
        chosen: the attention backend's choice, for messages.
        attention: the backend.
        runner: whose runner runs.
        ops_for: the ops of a `dtype`.
        engine: dtype, and the level that is demanded.

    Raises:
        CompositionError: it keeps less than is demanded; names every part that does, and what would do.
        PluginError: a part promises what is no level.
    """

    def kept(dtype: Dtype) -> tuple[Invariance, list[str]]:
        """Return the weakest promise, and who promises less than is demanded."""
        ops: Ops = ops_for(dtype=dtype)
        with blamed("invariance", chosen.offer):
            levels = promises(ops, attention, runner, dtype)
        for name, level in levels.items():
            if level not in INVARIANCE_ORDER:
                raise PluginError(f"{_who(name, ops, chosen)} promises the invariance {level!r}, which is no level")
        ranks = {name: INVARIANCE_ORDER.index(level) for name, level in levels.items()}
        short = [
            f"{_who(name, ops, chosen)} keeps {levels[name]!r}"
            for name, rank in ranks.items()
            if rank < INVARIANCE_ORDER.index(engine.invariance)
        ]
        return INVARIANCE_ORDER[min(ranks.values())], short

    level, short = kept(engine.dtype)
    if short:
        ways = [f"engine.invariance = {level!r}"]
        if engine.dtype != "float32" and not kept("float32")[1]:
            ways.append("engine.dtype = 'float32'")
        raise CompositionError(
            f"engine.invariance: {engine.invariance!r} is demanded, and in {engine.dtype} {', '.join(short)}; "
            f"what would do: {' or '.join(ways)}",
            field="engine.invariance",
        )
    return level


def _who(name: str, ops: Ops, chosen: Chosen) -> str:
    """Name who makes a promise."""
    return f"attention {chosen.key!r}" if name == "attention" else f"{name} of kernels {ops.choices[name].source!r}"
