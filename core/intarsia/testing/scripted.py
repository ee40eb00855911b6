"""A plugin with a runner that computes nothing and says what it is told, and a drafter that proposes what it is told.

::

    Engine.from_config({"model": ..., "runner": {"use": "scripted", "ids": [10, 11, 2]}}, plugins=[scripted])
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attrs import Factory, frozen

from intarsia.hookspecs import hookimpl
from intarsia.protocols import Drafter, DraftRequest, PartContext, RunnerContext
from intarsia.types import Draft, Fit, Provider, SequenceId, Unfit


@frozen(kw_only=True)
class ScriptOptions:
    """What the scripted runner says."""

    #: the ids to say, in turn
    ids: tuple[int, ...] = ()
    #: how long the prompt is, in tokens: the first id answers its last token
    prompt_tokens: int = 1
    #: what to say when the script is over
    then: int = 0
    #: how much likelier the scripted id is than any other, as a difference of logits
    margin: float = 100.0


@frozen(kw_only=True)
class GuessOptions:
    """What the scripted drafter proposes."""

    #: guesses for the generated ids, in turn: the guess for the i-th generated token is the i-th of them
    ids: tuple[int, ...] = ()
    #: length of the prompt, in tokens
    prompt_tokens: int = 1
    #: guesses a step at most
    k: int = 4


@frozen(eq=False)
class _ScriptedRunner:
    options: ScriptOptions
    vocab_size: int

    def run(self, batch: Any, cache: Any, layers: range, hidden_TE: Any = None) -> Any:
        del cache, layers, hidden_TE
        return batch.positions_T.unsqueeze(1)

    def logits(self, hidden_TE: Any, rows_L: Any) -> Any:
        positions = hidden_TE[rows_L].flatten().tolist()
        logits = hidden_TE.new_zeros((len(positions), self.vocab_size)).float()
        for row, position in enumerate(positions):
            turn = position - (self.options.prompt_tokens - 1)
            said = self.options.ids[turn] if 0 <= turn < len(self.options.ids) else self.options.then
            logits[row, said] = self.options.margin
        return logits


@frozen
class _ScriptedDrafter(Drafter):
    options: GuessOptions
    forgotten: list[SequenceId] = Factory(list)

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Draft]:
        begins = [len(request.token_ids) - self.options.prompt_tokens for request in requests]
        return [Draft(self.options.ids[begin : begin + self.options.k]) for begin in begins]

    def forget(self, sequence_id: SequenceId) -> None:
        self.forgotten.append(sequence_id)


@hookimpl
def provide_runners() -> list[Provider]:
    """The runner that says what it is told; never chosen by `auto`."""

    def fit(context: RunnerContext) -> Fit | Unfit:
        options: ScriptOptions = context.options
        beyond = [i for i in (*options.ids, options.then) if not 0 <= i < context.spec.vocab_size]
        if beyond:
            return Unfit(f"id {beyond[0]} is outside the vocabulary of {context.spec.vocab_size}")
        return Fit(0, "says what it is told")

    def build(context: RunnerContext) -> _ScriptedRunner:
        return _ScriptedRunner(context.options, context.spec.vocab_size)

    return [Provider(key="scripted", summary="says given ids", options=ScriptOptions, fit=fit, build=build)]


@hookimpl
def provide_drafters() -> list[Provider]:
    """The drafter that proposes what it is told."""

    def build(context: PartContext) -> _ScriptedDrafter:
        return _ScriptedDrafter(context.options)

    return [Provider(key="scripted", summary="proposes given ids", options=GuessOptions, build=build)]
