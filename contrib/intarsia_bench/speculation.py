"""`intarsia bench speculation`: engines with drafters, and one without, in turn on the same prompts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attrs import define, field, frozen

from intarsia import Engine, Request
from intarsia.cli.terminal import table
from intarsia.config import load_config
from intarsia.errors import ExecutionError
from intarsia_bench.speculation_work import ALL, Ask

if TYPE_CHECKING:
    from rich.table import Table

    from intarsia.protocols import Progress
    from intarsia.types import EngineConfig

PLAIN = "none"
#: Which prompts the warm-up has: none that is measured.
_WARM_UP = 9


@frozen(kw_only=True)
class Run:
    """One repeat of one workload by one engine.

    Attributes:
        seconds: from the step that brought the last first token to the end.
        num_tokens: that came in these seconds.
        num_rows: rows that brought them: a row without drafts brings one.
        drafted, accepted: drafts.
        answers: token ids, a request after another.
    """

    seconds: float
    num_tokens: int
    num_rows: int
    drafted: int
    accepted: int
    answers: tuple[tuple[int, ...], ...]

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.num_tokens / max(self.seconds, 1e-9)


def run(engine: Engine, asks: Sequence[Ask]) -> Run:
    """Answer requests that come at once, as they come to an engine of its own.

    Raises:
        ExecutionError: a request failed.
    """
    before = _drafts(engine)
    for index, ask in enumerate(asks):
        engine.add(Request(request_id=f"ask-{index}", prompt=list(ask.messages), params=ask.params))
    answers: dict[str, list[int]] = {f"ask-{index}": [] for index in range(len(asks))}
    begun, num_tokens, num_rows = time.perf_counter(), 0, 0
    while engine.has_work:
        outputs = engine.step()
        is_first = False
        for output in outputs:
            if output.error is not None:
                raise ExecutionError(f"{output.request_id}: {output.error}")
            is_first |= bool(output.token_ids) and not answers[output.request_id]
            answers[output.request_id] += output.token_ids
            num_tokens += len(output.token_ids)
            num_rows += bool(output.token_ids)
        if is_first:
            begun, num_tokens, num_rows = time.perf_counter(), 0, 0
    seconds = time.perf_counter() - begun
    after = _drafts(engine)
    return Run(
        seconds=seconds,
        num_tokens=num_tokens,
        num_rows=num_rows,
        drafted=after[0] - before[0],
        accepted=after[1] - before[1],
        answers=tuple(map(tuple, answers.values())),
    )


def _drafts(engine: Engine) -> tuple[int, int]:
    figures: Mapping[str, Any] = engine.stats().get("speculation", {"drafted": 0, "accepted": 0})
    return figures["drafted"], figures["accepted"]


@define
class Rival:
    """An engine, and what it did by workload."""

    drafter: str
    engine: Engine
    runs: dict[str, list[Run]] = field(factory=dict, init=False)


def measure(
    config: EngineConfig, drafters: Sequence[str], names: Sequence[str], repeats: int, *, progress: Progress
) -> list[dict[str, Any]]:
    """Run workloads; in each repeat every engine once, in an order that turns round from one repeat to the next.

    Returns:
        One row a workload and drafter, see `rows`.

    Raises:
        ExecutionError: a drafter changed an answer, though tokens must be equal and steps of any size have equal bits.
    """
    rivals: list[Rival] = []
    try:
        for index, drafter in enumerate((PLAIN, *drafters)):
            progress(f"loading: {drafter}", index, len(drafters) + 1)
            # Options of the config's own drafter belong to no other.
            overrides = [] if drafter == config.drafter.use else [f"drafter={drafter}"]
            rivals.append(Rival(drafter, Engine.from_config(load_config(config, overrides))))
            run(rivals[-1].engine, [ask for work in ALL.values() for ask in work(_WARM_UP)[:1]])
        _measure(rivals, names, repeats, progress)
    finally:
        for rival in rivals:
            rival.engine.close()
    return rows(rivals, names)


def _measure(rivals: Sequence[Rival], names: Sequence[str], repeats: int, progress: Progress) -> None:
    for turn, (name, repeat) in enumerate((name, repeat) for name in names for repeat in range(repeats)):
        for rival in rivals if repeat % 2 == 0 else rivals[::-1]:
            progress(f"{name} {repeat + 1}/{repeats}: {rival.drafter}", turn, len(names) * repeats)
            rival.runs.setdefault(name, []).append(run(rival.engine, ALL[name](repeat)))
        for rival in rivals[1:]:
            if rival.runs[name][-1].answers != rivals[0].runs[name][-1].answers and _must_equal(rival):
                raise ExecutionError(f"{name}: with the drafter {rival.drafter} the answers are others")


def _must_equal(rival: Rival) -> bool:
    parts = rival.engine.parts
    return parts.engine.verify == "equal" and parts.invariance == "bitwise"


def rows(rivals: Sequence[Rival], names: Sequence[str]) -> list[dict[str, Any]]:
    """Return one row a workload and drafter, as plain data.

    Keys:
        workload, drafter: what ran.
        tokens_per_s: the median of the repeats, first tokens left out.
        ratio: the median of the repeats' ratios to the engine without a drafter; min_ratio and max_ratio.
        drafted, accepted, acceptance: drafts of all repeats; None where there were none.
        tokens_per_step: that a row brought in a step.
        equal_answers: the part of the answers that were those of the engine without a drafter.
    """
    return [_row(rival, rivals[0], name) for name in names for rival in rivals]


def _row(rival: Rival, plain: Rival, name: str) -> dict[str, Any]:
    runs = rival.runs[name]
    ratios = [own.rate / other.rate for own, other in zip(runs, plain.runs[name], strict=True) if other.num_tokens] or [
        1.0
    ]
    drafted, accepted = sum(one.drafted for one in runs), sum(one.accepted for one in runs)
    return {
        "workload": name,
        "drafter": rival.drafter,
        "tokens_per_s": round(statistics.median(one.rate for one in runs), 1),
        "ratio": round(statistics.median(ratios), 3),
        "min_ratio": round(min(ratios), 3),
        "max_ratio": round(max(ratios), 3),
        "drafted": drafted,
        "accepted": accepted,
        "acceptance": round(accepted / drafted, 3) if drafted else None,
        "tokens_per_step": round(sum(one.num_tokens for one in runs) / max(1, sum(one.num_rows for one in runs)), 2),
        "equal_answers": round(_equal(runs, plain.runs[name]), 3),
    }


def _equal(runs: Sequence[Run], others: Sequence[Run]) -> float:
    pairs = [
        pair for run, other in zip(runs, others, strict=True) for pair in zip(run.answers, other.answers, strict=True)
    ]
    return sum(own == other for own, other in pairs) / len(pairs)


def speculation_table(measured: Sequence[Mapping[str, Any]]) -> Table:
    """Show rates, ratios and acceptance."""
    listed = table(
        "workload", "drafter", "tokens/s", "ratio", "min..max", "acceptance", "tokens a step", "equal answers"
    )
    before = ""
    for row in measured:
        listed.add_row(
            "" if row["workload"] == before else row["workload"],
            row["drafter"],
            f"{row['tokens_per_s']:.1f}",
            f"{row['ratio']:.2f}x",
            f"{row['min_ratio']:.2f}..{row['max_ratio']:.2f}",
            "" if row["acceptance"] is None else f"{100 * row['acceptance']:.0f}% of {row['drafted']}",
            f"{row['tokens_per_step']:.2f}",
            f"{100 * row['equal_answers']:.0f}%",
        )
        before = row["workload"]
    return listed
