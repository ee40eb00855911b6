"""Ranks that hold slices of a model, as processes without the executor that would plan for them.

`run_ranks` starts `python sliced_ranks.py FOLDER RANK SIZE` for each rank: it composes each job's config, runs its
prompts, and the first rank writes what came out. Many jobs share one start.
"""

import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from attrs import define

from intarsia.compose import compose
from intarsia.config import load_config
from intarsia.hookspecs import hookimpl
from intarsia.plugins import Registry
from intarsia.types import BatchPlan, Demand, Entered, PluginsOptions, Provider, Row, SamplingParams
from intarsia_parallel.options import ParallelOptions
from intarsia_parallel.partition import build as build_partition

_TIMEOUT_S = 120


@define
class HeldExecutor:
    """Keeps its context, for tests that drive a stage by hand."""

    context: object

    depth = 1

    def start(self, progress):
        raise AssertionError

    submit = collect = stop = start


@hookimpl
def provide_executors():
    """An executor with the partition of `parallel`."""
    return [
        Provider(
            key="held",
            summary="for tests",
            options=ParallelOptions,
            partition=build_partition,
            build=HeldExecutor,
        )
    ]


class SlicedRank:
    """One rank of a composed model: loads its share and runs rows."""

    def __init__(self, sections, executor, rank=0, group=None, registry=None):
        self.parts = self.composed(sections, executor, rank, registry)
        self.context = self.parts.executor.context
        self.tensor = self.context.partition.tensor
        self.group = group
        self.tensor.connect(group)
        self.stage = self.context.build_stage(self.context)
        self.stage.load(lambda *_: None)
        self.stage.allocate()

    @staticmethod
    def composed(sections, executor, rank=0, registry=None):
        """Compose one rank; nothing is loaded."""
        engine = {"dtype": "float32", "threads": 1, "max_model_len": 128} | sections.get("engine", {})
        plain = {"kernels": "torch", "runner": "eager", "attention": "eager", "cache": {"memory": "8MiB"}}
        held = {"engine": engine, "executor": {"use": "held", "rank": rank} | executor}
        config = load_config(plain | sections | held)
        return compose(config, registry or Registry.discover(config.engine.plugins, [sys.modules[__name__]]))

    def row(self, name, ids, start=0):
        cache = self.parts.cache
        assert cache.reserve((name, 0), ids, len(ids)) is not None
        return Row(sequence_id=(name, 0), token_ids=tuple(ids[start:]), start=start, pages=cache.pages((name, 0)))

    @torch.inference_mode()
    def run(self, rows):
        """Return the logits after every token on the first rank."""
        batch = self.stage.batch(rows, [row.token_ids for row in rows])
        count = len(batch.ids_T)
        demand = Demand(rows_L=tuple(range(count)), plain_L=(False,) * count)
        return self.tensor.gather_logits(self.stage.logits(self.stage.run(batch), demand.rows_L), demand)

    @torch.inference_mode()
    def generate(self, prompts, params, steps):
        """Return the ids that follow each prompt, all in one batch, as the first rank chooses them, and its results."""
        entered = [
            Entered(
                sequence_id=(str(i), 0),
                params=one.filled(self.parts.sampling),
                seed=one.seed or 0,
                token_ids=tuple(prompt),
                num_prompt=len(prompt),
            )
            for i, (prompt, one) in enumerate(zip(prompts, params, strict=True))
        ]
        plan = BatchPlan(entered=tuple(entered))
        demands, choosing = self.context.build_demands(self.context), self.context.build_choosing(self.context)
        demands.meet(plan)
        choosing.meet(plan)
        known, results = [list(ids) for ids in prompts], []
        for step in range(steps):
            starts = [len(ids) - 1 if step else 0 for ids in known]
            rows = [self.row(str(i), ids, start) for i, (ids, start) in enumerate(zip(known, starts, strict=True))]
            chosen, found = self._choose(rows, demands, choosing)
            results.append(found)
            for ids, token in zip(known, chosen.tolist(), strict=True):
                ids.append(token)
        return [ids[len(prompt) :] for ids, prompt in zip(known, prompts, strict=True)], results

    def _choose(self, rows, demands, choosing):
        batch = self.stage.batch(rows, [row.token_ids for row in rows])
        hidden = self.stage.run(batch)

        def logits_of(demand):
            return self.tensor.gather_logits(self.stage.logits(hidden, demand.rows_L), demand)

        chosen, results = torch.zeros(len(rows), dtype=torch.int64), []
        if self.tensor.rank == 0:
            results = choosing.choose(rows, batch.bounds, logits_of)
            assert not any(result.error for result in results), results
            chosen = torch.tensor([result.token_ids[0] for result in results])
        else:
            for demand in demands.of(rows, batch.bounds):
                logits_of(demand)
        if self.tensor.size > 1:
            self.group.broadcast([chosen]).wait()
        return chosen, results


def _answer(rank, prompts, params, steps):
    found = {}
    for number, prompt in enumerate(prompts):
        found[f"logits{number}"] = rank.run([rank.row(f"whole{number}", prompt)])
    # Rows of other lengths in one batch, one of them the second part of a prompt.
    cut = len(prompts[0]) // 2
    rank.run([rank.row("part", prompts[0][:cut])])
    rows = [rank.row("part", prompts[0], cut), *(rank.row(f"again{n}", p) for n, p in enumerate(prompts[1:]))]
    rank.tensor.traffic.clear()
    found["mixed"] = rank.run(rows)
    traffic = rank.tensor.traffic.figures()
    ids, results = rank.generate(prompts, params, steps)
    found["ids"] = torch.tensor(ids)
    reported = [entry for step in results for result in step for entry in result.logprobs]
    if reported:
        # As many of the likeliest as there are ids: each id with its log-probability.
        found["top"] = torch.tensor([sorted(entry.top) for entry in reported])
    return found, traffic


def main(folder, rank, size):
    """Run every job of a folder as one of its ranks."""
    torch.set_num_threads(1)
    group = dist.ProcessGroupGloo(dist.FileStore(str(folder / "store"), size), rank, size, timedelta(seconds=60))
    arrays, traffic = {}, {}
    registry = Registry.discover(PluginsOptions(), [sys.modules[__name__]])
    for name, job in json.loads((folder / "jobs.json").read_text()).items():
        one = SlicedRank(job["sections"], {"tp": size} | job["executor"], rank, group, registry)
        found, traffic[name] = _answer(
            one, job["prompts"], [SamplingParams(**each) for each in job["params"]], job["steps"]
        )
        arrays |= {f"{name}/{key}": tensor.numpy() for key, tensor in found.items() if tensor is not None}
    (folder / f"traffic{rank}.json").write_text(json.dumps(traffic))
    group.barrier().wait()
    if rank == 0:
        np.savez(folder / "results.npz", **arrays)


def run_ranks(folder, size, jobs):
    """Start `size` ranks, let them run jobs, and return (arrays by `job/what`, each rank's traffic by job)."""
    folder.mkdir(parents=True)
    (folder / "jobs.json").write_text(json.dumps(jobs))
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)}
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, str(folder), str(rank), str(size)],
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(size)
    ]
    try:
        errors = [process.communicate(timeout=_TIMEOUT_S)[1] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert not any(process.returncode for process in ranks), "\n\n".join(errors)
    traffic = [json.loads((folder / f"traffic{rank}.json").read_text()) for rank in range(size)]
    return dict(np.load(folder / "results.npz")), traffic


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    # All is written. A process group that is taken down with the interpreter may end it by a signal.
    os._exit(0)
