"""An engine of ours under measurement: driven step by step, so that each token's time is known."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Self

from attrs import define

from intarsia import Engine, Request, SamplingParams
from intarsia.errors import ConfigError, ExecutionError
from intarsia_bench.contender import Measurement
from intarsia_bench.latency import Latencies
from intarsia_bench.peers import workloads

if TYPE_CHECKING:
    from intarsia.protocols import Progress
    from intarsia.types import EngineConfig


def run(engine: Engine, requests: workloads.Work) -> Latencies:
    """Add requests all at once, and step until they are answered.

    Raises:
        ExecutionError: an answer is not as long as it was asked to be.
    """
    arrived = time.perf_counter()
    for index, (ids, num_tokens) in enumerate(requests):
        params = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True, seed=0)
        engine.add(Request(request_id=f"bench-{index}", prompt=ids, params=params))
    steps: dict[str, list[tuple[float, int]]] = {f"bench-{index}": [] for index in range(len(requests))}
    while engine.has_work:
        outputs = engine.step()
        now = time.perf_counter()
        for output in outputs:
            if output.error is not None:
                raise ExecutionError(f"{output.request_id}: {output.error}")
            steps[output.request_id].append((now, len(output.token_ids)))
    for (name, came), (_, wanted) in zip(steps.items(), requests, strict=True):
        count = sum(n for _, n in came)
        if count != wanted:
            raise ExecutionError(f"{name}: {count} tokens came, and {wanted} were asked for")
    return Latencies.of(arrived, steps.values())


def check_suits(names: Sequence[str], num_ids: int, max_model_len: int) -> None:
    """Check that a model can run workloads.

    Raises:
        ConfigError: its vocabulary or its context is too small.
    """
    if num_ids <= workloads.LAST_ID:
        raise ConfigError(
            f"model: the workloads' prompts are token ids {workloads.FIRST_ID} to {workloads.LAST_ID}, and this model "
            f"has {num_ids}; take one with a larger vocabulary, such as smollm2",
            field="model",
        )
    for name in names:
        longest = max(len(ids) + num_tokens for ids, num_tokens in workloads.work(name, 0))
        if longest > max_model_len:
            raise ConfigError(
                f"engine.max_model_len: {max_model_len} is less than the {longest} tokens of workload {name!r}; name "
                "others with --workload",
                field="engine.max_model_len",
            )


@define(eq=False)
class Composition:
    """An engine of ours, under the name that the table gives it."""

    name: str
    engine: Engine

    @classmethod
    def open(
        cls,
        name: str,
        config: EngineConfig,
        *,
        workload_names: Sequence[str] = (),
        plugins: Mapping[str, object] | None = None,
        progress: Progress | None = None,
    ) -> Self:
        """Load an engine and warm it up.

        Raises:
            IntarsiaError: it cannot be made, or cannot run these workloads.
        """
        engine = Engine.from_config(config, plugins=plugins or {}, progress=progress)
        try:
            parts = engine.parts
            assert parts.engine.max_model_len is not None
            check_suits(workload_names, parts.num_ids, parts.engine.max_model_len)
            run(engine, workloads.warm_up())
        except BaseException:
            engine.close()
            raise
        return cls(name, engine)

    def measure(self, workload: str, repeat: int) -> Measurement:
        """Run one repeat of a workload; the latencies are those of the whole work, first tokens included."""
        runs: list[Latencies] = []
        seconds = workloads.measure(workload, repeat, lambda requests: runs.append(run(self.engine, requests)))
        return Measurement(seconds, runs[0])

    def close(self) -> None:
        """Close the engine."""
        self.engine.close()
