"""The contract of drafters, as tests to inherit.

::

    from intarsia.testing.drafters import DrafterContract

    class TestMine(DrafterContract):
        options = {"k": 4}

        def provider(self):
            return my_plugin.provide_drafters()[0]

pytest runs the inherited tests. They hold a drafter to what none may do: change an answer, fail, propose more than was
wanted, mix up sequences that are preempted or whose ids are used again, keep what has left. Whether its guesses are
any good is not a matter of contract; `WatchedDrafter` counts them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from attrs import define, evolve, field

from intarsia.hookspecs import hookimpl
from intarsia.protocols import Drafter, DrafterContext, DraftRequest, StepCost, Target, Verified
from intarsia.testing.tiny import save_tiny_model
from intarsia.types import CacheLayout, Draft, Entered, Provider, Request, SamplingParams, SequenceId

__all__ = ["DrafterContract", "WatchedDrafter", "watching"]


@define(eq=False)
class WatchedDrafter(Drafter):
    """Passes all calls on, and notes what breaks the contract.

    Attributes:
        inner: who is watched.
        faults: what was wrong, in words.
        entered: how often each sequence has entered since it was forgotten last.
        num_reentered: how often a sequence entered again, after a preemption.
        drafted, accepted: guesses that were verified.
    """

    inner: Drafter
    faults: list[str] = field(factory=list, init=False)
    entered: Counter[SequenceId] = field(factory=Counter, init=False)
    num_reentered: int = field(default=0, init=False)
    drafted: int = field(default=0, init=False)
    accepted: int = field(default=0, init=False)

    def num_bytes(self, layout: CacheLayout) -> int:
        """Pass it on."""
        return self.inner.num_bytes(layout)

    def start(self, target: Target) -> None:
        """Pass it on."""
        self.inner.start(target)

    def enter(self, entered: Entered) -> None:
        """Count."""
        self.entered[entered.sequence_id] += 1
        self.num_reentered += self.entered[entered.sequence_id] > 1
        self._passing("enter", lambda: self.inner.enter(entered))

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Draft]:
        """Check what is proposed."""
        before = [tuple(request.token_ids) for request in requests]
        drafts: list[Draft] = []
        self._passing("propose", lambda: drafts.extend(self.inner.propose(requests)))
        if len(drafts) != len(requests):
            self.faults.append(f"{len(drafts)} drafts for {len(requests)} requests")
            return [Draft() for _ in requests]
        for request, ids, draft in zip(requests, before, drafts, strict=True):
            if len(draft.token_ids) > request.wanted:
                self.faults.append(f"{len(draft.token_ids)} guesses where {request.wanted} were wanted")
            if tuple(request.token_ids) != ids:
                self.faults.append("the request's token ids were changed")
            if draft.probabilities is not None and len(draft.probabilities) != len(draft.token_ids):
                self.faults.append(f"{len(draft.probabilities)} rows of probabilities, {len(draft.token_ids)} guesses")
        return drafts

    def observe(self, verified: Sequence[Verified], cost: StepCost) -> None:
        """Count."""
        self.drafted += sum(one.drafted for one in verified)
        self.accepted += sum(one.accepted for one in verified)
        self._passing("observe", lambda: self.inner.observe(verified, cost))

    def forget(self, sequence_id: SequenceId) -> None:
        """Count."""
        self.entered.pop(sequence_id, None)
        self._passing("forget", lambda: self.inner.forget(sequence_id))

    def stats(self) -> Mapping[str, Any]:
        """Pass it on."""
        return self.inner.stats()

    def stop(self) -> None:
        """Pass it on."""
        self._passing("stop", self.inner.stop)

    def _passing(self, doing: str, call: Callable[[], None]) -> None:
        """An engine goes on without a drafter that fails, so that its failure must be noted here."""
        try:
            call()
        except Exception as error:
            self.faults.append(f"{doing}: {type(error).__name__}: {error}")
            raise


class _Plugin:
    """Offers one drafter under the key `watched`."""

    def __init__(self, provider: Provider) -> None:
        self._provider = provider

    @hookimpl
    def provide_drafters(self) -> list[Provider]:
        return [self._provider]


def watching(provider: Provider) -> object:
    """Return a plugin whose drafter `watched` is the provider's, in a WatchedDrafter."""

    def build(context: DrafterContext) -> WatchedDrafter:
        return WatchedDrafter(provider.build(context))

    return _Plugin(evolve(provider, key="watched", build=build))


#: Prompts whose ends have come before, which come near it, and which have nothing of it.
PROMPTS: tuple[tuple[int, ...], ...] = (
    (1, 1, 1),
    (5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6),
    (3,),
    tuple(range(40)),
    (10, 11, 12, 13, 10, 11, 14, 10, 11),
    (0, 0, 2, 0, 0),
)
#: Greedy, seeded, with penalties, with choices, short, stopped: a batch takes one a prompt.
PARAMS: tuple[SamplingParams, ...] = (
    SamplingParams(temperature=0, max_tokens=40, logprobs=2),
    SamplingParams(temperature=0.7, seed=11, max_tokens=40),
    SamplingParams(temperature=0, repetition_penalty=1.3, max_tokens=30),
    SamplingParams(temperature=1.0, top_p=0.8, seed=5, n=3, max_tokens=20),
    SamplingParams(temperature=0.3, seed=3, max_tokens=1),
    SamplingParams(temperature=0, stop_token_ids=(7, 8, 9), max_tokens=40),
)


class DrafterContract:
    """What every drafter keeps. Subclass it, name the class `Test...`, and say whose provider it is.

    Attributes:
        options: the drafter's own, as a config has them.
        num_ids: of the tiny random model that it drafts for.
        page_tokens: tokens of the small cache that forces preemptions.
    """

    options: ClassVar[Mapping[str, Any]] = {}
    num_ids: ClassVar[int] = 64
    page_tokens: ClassVar[int] = 160

    def provider(self) -> Provider:
        """Return the drafter's provider."""
        raise NotImplementedError

    def model(self, folder: Path) -> Path:
        """Return the model's folder; made under `folder` unless this is overridden."""
        return save_tiny_model(folder / "model", num_ids=self.num_ids)

    # --- the tests --------------------------------------------------------------------------------------------------

    def test_drafts_change_no_answer(self, tmp_path: Path) -> None:
        """Greedy and seeded answers of a mixed batch are those without the drafter, log-probabilities included."""
        self._check(tmp_path, PROMPTS, PARAMS)

    def test_drafts_change_no_answer_of_one_sequence(self, tmp_path: Path) -> None:
        """Nor do they where it runs alone."""
        for prompt in PROMPTS[:2]:
            self._check(tmp_path, [prompt], [SamplingParams(temperature=0, max_tokens=60)])

    def test_preempted_sequences_go_on_as_they_were(self, tmp_path: Path) -> None:
        """Sequences enter again after a preemption, with what they had said by then."""
        params = [SamplingParams(temperature=0, max_tokens=50), SamplingParams(temperature=0.5, seed=1, max_tokens=50)]
        small = {"cache": {"use": "paged", "memory": str(self._bytes(self.page_tokens))}, "scheduler": "inflight"}
        watched = self._check(tmp_path, PROMPTS, params * 3, **small)
        assert watched.num_reentered, "nothing was preempted: make page_tokens smaller"

    def test_an_id_can_be_used_again(self, tmp_path: Path) -> None:
        """A request that left is forgotten: another of its id is another."""
        from intarsia.engine import Engine

        model, params = self.model(tmp_path), SamplingParams(temperature=0, max_tokens=24)
        with (
            Engine.from_config(self._config(model)) as plain,
            Engine.from_config(self._config(model) | self._drafting(), plugins=[watching(self.provider())]) as drafting,
        ):
            for prompt in (*PROMPTS[:3], *PROMPTS[:3]):
                assert _answer(drafting, prompt, params) == _answer(plain, prompt, params)
            _no_faults(drafting)
            assert len(_watched(drafting).entered) <= 1, "engines tell a drafter of those that left"

    def test_a_cancelled_sequence_is_forgotten(self, tmp_path: Path) -> None:
        """Whatever state it is in; the others' answers stay what they are."""
        from intarsia.engine import Engine

        model, params = self.model(tmp_path), SamplingParams(temperature=0, max_tokens=24)
        with Engine.from_config(self._config(model) | self._drafting(), plugins=[watching(self.provider())]) as engine:
            before = _answer(engine, PROMPTS[1], params)
            engine.add(Request(request_id="given up", prompt=list(PROMPTS[0]), params=params))
            for _ in range(4):
                engine.step()
            engine.cancel("given up")
            assert _answer(engine, PROMPTS[1], params) == before
            _no_faults(engine)
            assert ("given up", 0) not in _watched(engine).entered

    def test_figures_are_plain_data(self, tmp_path: Path) -> None:
        """`stats` can be sent to clients, as JSON with texts for keys, before the first step and after the last."""
        from intarsia.engine import Engine

        plugins = [watching(self.provider())]
        with Engine.from_config(self._config(self.model(tmp_path)) | self._drafting(), plugins=plugins) as engine:
            _check_plain(_watched(engine).stats())
            _answer(engine, PROMPTS[1], SamplingParams(temperature=0, max_tokens=24))
            _check_plain(_watched(engine).stats())

    def test_it_stops_twice(self, tmp_path: Path) -> None:
        """`stop` is safe to call again."""
        from intarsia.engine import Engine

        plugins = [watching(self.provider())]
        engine = Engine.from_config(self._config(self.model(tmp_path)) | self._drafting(), plugins=plugins)
        watched = _watched(engine)
        engine.close()
        watched.stop()
        assert not watched.faults, watched.faults

    # --- what they are made of --------------------------------------------------------------------------------------

    def _check(
        self, folder: Path, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], **sections: Any
    ) -> WatchedDrafter:
        """Compare the answers of an engine with those of one without the drafter."""
        from intarsia.engine import Engine

        config = self._config(self.model(folder)) | sections
        asked = [list(prompt) for prompt in prompts]
        with Engine.from_config(config) as plain:
            wanted = [[_said(choice) for choice in c.choices] for c in plain.generate(asked, list(params))]
        with Engine.from_config(config | self._drafting(), plugins=[watching(self.provider())]) as engine:
            got = [[_said(choice) for choice in c.choices] for c in engine.generate(asked, list(params))]
            _no_faults(engine)
            assert got == wanted, "the drafter changed an answer"
            return _watched(engine)

    def _config(self, model: Path) -> dict[str, Any]:
        engine = {"dtype": "float32", "threads": 1, "max_model_len": 128}
        return {"model": str(model), "engine": engine, "cache": {"memory": "16MiB"}}

    def _drafting(self) -> dict[str, Any]:
        return {"drafter": {"use": "watched", **self.options}}

    def _bytes(self, num_tokens: int) -> int:
        """Bytes of a cache of so many tokens: 2 layers, keys and values of one head of 16 numbers in fp32."""
        return num_tokens * 2 * 2 * 16 * 4


def _said(choice: Any) -> tuple[Any, ...]:
    assert choice.error is None, choice.error
    logprobs = [round(entry.logprob, 3) for entry in choice.logprobs or ()]
    return tuple(choice.token_ids), choice.finish_reason, logprobs


def _check_plain(figures: Mapping[str, Any]) -> None:
    """JSON would make texts of keys: read back, the figures must be the same."""
    plain = json.loads(json.dumps(dict(figures), allow_nan=False))
    assert plain == dict(figures), "stats: use texts for keys, and lists for tuples"


def _answer(engine: Any, prompt: Sequence[int], params: SamplingParams) -> list[int]:
    """Ask under one and the same request id."""
    engine.add(Request(request_id="again", prompt=list(prompt), params=params))
    ids: list[int] = []
    while engine.has_work:
        for output in engine.step():
            if output.request_id == "again":
                assert output.error is None, output.error
                ids += output.token_ids
    return ids


def _watched(engine: Any) -> WatchedDrafter:
    watched = engine.parts.drafter
    assert isinstance(watched, WatchedDrafter)
    return watched


def _no_faults(engine: Any) -> None:
    assert not _watched(engine).faults, _watched(engine).faults
    figures = engine.stats()["speculation"]
    assert not figures["failures"], figures["last_failure"]
