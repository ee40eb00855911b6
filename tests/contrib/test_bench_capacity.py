"""How many requests run at once in a cache, found without a model."""

import json

from attrs import define, field

from intarsia.cli import run
from intarsia.types import BatchPlan, Row, Want
from intarsia_bench import capacity
from intarsia_bench.peers import workloads


@define
class Two:
    """A scheduler that runs two at once, prompts in chunks of 2, and preempts the second once."""

    preempts_at: int | None = None
    waiting: list = field(factory=list)
    running: dict = field(factory=dict)
    steps: int = 0

    def add(self, sequence):
        self.waiting.append(sequence)

    def remove(self, sequence_id):
        del self.running[sequence_id]

    def plan(self):
        self.steps += 1
        preempted = ()
        if self.steps == self.preempts_at:
            preempted = (list(self.running)[-1],)
            self.waiting.insert(0, self.running.pop(preempted[0]))
        else:
            while self.waiting and len(self.running) < 2:
                sequence = self.waiting.pop(0)
                self.running[sequence.sequence_id] = sequence
        return BatchPlan(rows=tuple(map(self.row, self.running.values())), preempted=preempted, entered=())

    def row(self, sequence):
        start = sequence.num_computed
        ids = tuple(sequence.token_ids[start : start + 2])
        want = Want.LAST if start + len(ids) == len(sequence.token_ids) else Want.NONE
        return Row(sequence_id=sequence.sequence_id, token_ids=ids, start=start, want=want)

    def update(self, plan, results):
        pass

    num_running = property(lambda self: len(self.running))
    num_waiting = property(lambda self: len(self.waiting))


class NoBooks:
    def commit(self, sequence_id, token_ids, num_computed):
        assert num_computed <= len(token_ids)


def test_a_simulation_counts_who_runs_and_who_waits_step_by_step():
    steps, preempted = capacity.simulate(Two(), NoBooks(), [([1], 1), ([1, 2, 3], 1), ([1], 2)])
    # Step 1: a ends, b is halfway. Step 2: b ends, c says one token. Step 3: c ends.
    assert steps == [(2, 1, False), (2, 0, True), (1, 0, True)]
    assert preempted == 0


def test_a_simulation_runs_what_was_preempted_again():
    steps, preempted = capacity.simulate(Two(preempts_at=2), NoBooks(), [([1], 3), ([1, 2, 3], 1)])
    assert preempted == 1
    # b computes 2 tokens, loses them, and takes two steps more from the start.
    assert steps == [(2, 0, False), (1, 1, False), (2, 0, False), (1, 0, True)]


def test_a_paged_cache_holds_at_least_three_times_the_requests_of_a_contiguous_one(capsys, monkeypatch):
    """With a context no longer than the longest request: a longer one would make it easy."""
    monkeypatch.setattr(capacity, "_TIMES", 10)
    assert run(["bench", "-m", "smollm2", "-o", "engine.dtype=bfloat16", "--capacity", "--json"]) == 0
    paged, contiguous, *of_the_model = json.loads(capsys.readouterr().out)
    longest = max(len(ids) + n for seed in range(10) for ids, n in workloads.work("mixed", seed))
    assert paged["max_model_len"] == contiguous["max_model_len"] == longest
    assert contiguous["engine"] == "intarsia cache=contiguous"
    assert 0 <= paged["cache_bytes"] - contiguous["cache_bytes"] < longest * 23040
    # 23040 bytes a token = 2 x 30 layers x 3 kv heads x 64 x 2 bytes; each region holds the longest request.
    assert contiguous["mean"] == contiguous["peak"] == 2**30 // (-(-longest // 16) * 16 * 23040)
    assert paged["ratio"] == round(paged["mean"] / contiguous["mean"], 3) >= 3
    assert [one["max_model_len"] for one in of_the_model] == [8192, 8192]
    assert of_the_model[0]["ratio"] > paged["ratio"]


def test_capacity_is_the_same_every_time(model, capsys, monkeypatch):
    monkeypatch.setattr(capacity, "_TIMES", 2)
    said = []
    for _ in range(2):
        more = ("-o", "cache.memory=1MiB", "-o", "engine.dtype=float32", "--vs", "cache.page_size=128")
        assert run(["bench", "-m", model, "-o", "engine.max_model_len=1024", *more, "--capacity"]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]
    assert "intarsia cache.page_size=128" in said[0]
