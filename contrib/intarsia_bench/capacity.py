"""How many requests run at once in a cache: schedulers and books are run, a model is not.

What a token is does not matter here, so that the outcome is the same on every machine.
"""

from __future__ import annotations

from typing import Any

from attrs import define, evolve, field, frozen

from intarsia.compose import compose
from intarsia.config import load_config
from intarsia.plugins import Registry
from intarsia.protocols import CacheAllocator, PartContext, Parts, Scheduler
from intarsia.types import EngineConfig, Entered, RowResult, SamplingParams, SequenceId, Want
from intarsia_bench.peers import workloads

#: For the cache, where a config leaves it to what happens to be free.
MEMORY = "1GiB"
#: Sequences that run at once: no scheduler of its own accord stops before the cache does.
_MAX_BATCH = 4096
#: How many times the workload is asked for, with new prompts each time.
_TIMES = 24


@define(eq=False)
class _Sequence:
    """What the engine would own; see `intarsia.protocols.SequenceView`."""

    sequence_id: SequenceId
    token_ids: list[int]
    max_total: int
    priority: int = 0
    salt: str = ""
    params: SamplingParams = field(factory=SamplingParams)
    seed: int = 0
    num_prompt: int = field(init=False)
    num_computed: int = field(default=0, init=False)

    def __attrs_post_init__(self) -> None:
        self.num_prompt = len(self.token_ids)

    def entered(self) -> Entered:
        return Entered(
            sequence_id=self.sequence_id,
            params=self.params,
            seed=self.seed,
            token_ids=tuple(self.token_ids),
            num_prompt=self.num_prompt,
        )


@frozen(kw_only=True)
class Capacity:
    """How many requests ran at once, while more of them waited.

    Attributes:
        peak: at most, in one step.
        mean: a step, from the first answer's end to the last request's start.
        steps: that all requests took.
        preempted: how often a sequence lost its pages and was run again.
    """

    engine: str
    cache_bytes: int
    max_model_len: int
    peak: int
    mean: float
    steps: int
    preempted: int


def capacity(name: str, config: EngineConfig, *, max_model_len: int | None = None) -> Capacity:
    """Compose, load nothing, and run many requests of `mixed` through scheduler and cache.

    Args:
        name: what the table calls it.
        config: give `cache.memory`, so that the outcome does not depend on what happens to be free.
        max_model_len: instead of the config's.
    """
    registry = Registry.discover(config.engine.plugins)
    if max_model_len is not None:
        config = load_config(config, [f"engine.max_model_len={max_model_len}"])
    parts = compose(config, registry)
    assert parts.engine.max_model_len is not None
    requests = [request for seed in range(_TIMES) for request in workloads.work("mixed", seed)]
    running, preempted = simulate(_unlimited(parts), parts.cache, requests)
    crowded = [count for count, num_waiting, any_finished in running if num_waiting and any_finished]
    return Capacity(
        engine=name,
        cache_bytes=parts.num_pages * parts.layout.page_bytes,
        max_model_len=parts.engine.max_model_len,
        peak=max(count for count, _, _ in running),
        mean=sum(crowded) / len(crowded) if crowded else float(len(requests)),
        steps=len(running),
        preempted=preempted,
    )


def _unlimited(parts: Parts) -> Scheduler:
    """Return the composition's scheduler, over the same cache, where it has a limit of its own without it."""
    selection = parts.selection("scheduler")
    if not hasattr(selection.options, "max_batch"):
        return parts.scheduler
    scheduler: Scheduler = selection.provider.build(
        PartContext(
            options=evolve(selection.options, max_batch=_MAX_BATCH),
            engine=parts.engine,
            spec=parts.spec,
            parts={slot: getattr(parts, slot) for slot in selection.provider.requires},
        )
    )
    return scheduler


def longest_request() -> int:
    """Return the tokens of the longest request that `mixed` can have: the tightest `max_model_len`."""
    return max(len(ids) + n for seed in range(_TIMES) for ids, n in workloads.work("mixed", seed))


def simulate(
    scheduler: Scheduler, cache: CacheAllocator, requests: workloads.Work
) -> tuple[list[tuple[int, int, bool]], int]:
    """Run requests as an engine does, in steps that compute nothing.

    Returns:
        For each step (sequences that hold pages, sequences that wait, whether any has finished before), and how many
        were preempted.
    """
    sequences: dict[SequenceId, Any] = {}
    for index, (ids, num_tokens) in enumerate(requests):
        sequence = _Sequence((f"bench-{index}", 0), list(ids), len(ids) + num_tokens)
        sequences[sequence.sequence_id] = sequence
        scheduler.add(sequence)
    steps, preempted = [], 0
    while sequences:
        plan = scheduler.plan()
        assert plan.rows, "the scheduler is stuck"
        preempted += len(plan.preempted)
        for sequence_id in plan.preempted:
            sequences[sequence_id].num_computed = 0
        steps.append((scheduler.num_running, scheduler.num_waiting, len(sequences) < len(requests)))
        results = []
        for row in plan.rows:
            sequence = sequences[row.sequence_id]
            sequence.num_computed = row.start + len(row.token_ids)
            said = () if row.want is Want.NONE else (0,)
            sequence.token_ids += said
            cache.commit(row.sequence_id, sequence.token_ids, sequence.num_computed)
            results.append(RowResult(sequence_id=row.sequence_id, token_ids=said))
        scheduler.update(plan, results)
        for row in plan.rows:
            sequence = sequences[row.sequence_id]
            if len(sequence.token_ids) >= sequence.max_total:
                scheduler.remove(row.sequence_id)
                del sequences[row.sequence_id]
    return steps, preempted
