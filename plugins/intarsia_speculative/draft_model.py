"""A second, smaller model as the drafter, with a cache of its own.

It runs over each sequence's tokens as the target does, a little behind; what a rejection made stale is written anew.
Its logits go through the request's own penalties, processors and bans, and ids are drawn with the numbers that the
target draws with: where the two models agree, they say the same (Leviathan et al. 2023; Chen et al. 2023).

Shape legend: R rows, V vocab.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from attrs import define, field

from intarsia.errors import CompositionError, ConfigError
from intarsia.protocols import Drafter, DrafterContext, DraftRequest, Parts, Target, TokenizerView
from intarsia.types import CacheLayout, Draft, Entered, Row, SequenceId, Want
from intarsia_speculative.control import controlled
from intarsia_speculative.guessing import Guessing, guess
from intarsia_speculative.model_options import DraftModelOptions

if TYPE_CHECKING:
    import torch

#: Tokens that are run in one step to catch up with sequences. What is further behind gets no guesses for a while.
_CATCH_UP = 2048


@define(eq=False)
class _Held:
    """What the second model's cache holds of one sequence.

    Attributes:
        salt: whose cached prefixes it may share.
        num_accepted: first tokens of the sequence.
        guesses: ids behind them, which may have been accepted since.
        has_pages: whether it has a page table.
    """

    salt: str = ""
    num_accepted: int = 0
    guesses: tuple[int, ...] = ()
    has_pages: bool = False

    def agree(self, token_ids: Sequence[int]) -> None:
        """Learn which guesses were accepted. The last token is always run again, for its logits."""
        for token in self.guesses:
            if self.num_accepted >= len(token_ids) - 1 or token_ids[self.num_accepted] != token:
                break
            self.num_accepted += 1
        self.guesses = ()


@define(eq=False)
class DraftModel(Drafter):
    """Runs the second model k times a step, over all sequences that want guesses.

    Attributes:
        parts: the second model, which is started and stopped with this.
    """

    parts: Parts
    _model: Target = field(init=False)
    _target: Target | None = field(default=None, init=False)
    _held: dict[SequenceId, _Held] = field(factory=dict, init=False)
    _figures: dict[str, int] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._model = cast(Target, self.parts.executor)
        self._figures = dict.fromkeys(("no_room", "caught_up_tokens"), 0)

    def num_bytes(self, layout: CacheLayout) -> int:
        """Return the bytes of the second model's weights and cache."""
        del layout
        return self.parts.weight_bytes + (self.parts.num_pages + 1) * self.parts.layout.page_bytes

    def start(self, target: Target) -> None:
        """Load the second model."""
        self._target = target
        self.parts.executor.start(_no_progress)

    def stop(self) -> None:
        """Free the second model."""
        self.parts.executor.stop()

    def enter(self, entered: Entered) -> None:
        """Note a sequence. After a preemption, its keys and values are still here."""
        self._held.setdefault(entered.sequence_id, _Held(entered.salt))

    def forget(self, sequence_id: SequenceId) -> None:
        """Give its pages back."""
        self._held.pop(sequence_id, None)
        self.parts.cache.release(sequence_id)

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Draft]:
        """Catch up, and guess as far as there is room."""
        assert self._target is not None, "start() comes first"
        guessings: dict[SequenceId, Guessing] = {}
        behind: list[Row] = []
        budget = _CATCH_UP
        for request in requests:
            one = self._begin(request) if budget > 0 else None
            if one is None:
                continue
            lacks = len(request.token_ids) - one.begin
            if lacks <= budget:
                guessings[request.sequence_id] = one
            else:
                behind.append(_part(one, budget))
            budget -= lacks
        if behind:
            self._model.forward(behind, moves=self.parts.cache.take_moves())
            self._caught_up(behind)
        guess(list(guessings.values()), self._target, self._forward)
        for sequence_id, one in guessings.items():
            held = self._held[sequence_id]
            held.num_accepted, held.guesses = len(one.request.token_ids), tuple(one.token_ids[:-1])
        return [guessings[r.sequence_id].draft() if r.sequence_id in guessings else Draft() for r in requests]

    def stats(self) -> Mapping[str, Any]:
        """Return figures: sequences without room in the second model's cache, tokens run to catch up, the cache's."""
        cache = self.parts.cache.stats()
        return {**self._figures, "draft_pages": cache.num_pages, "draft_pages_used": cache.used}

    def _forward(self, rows: Sequence[Row]) -> torch.Tensor:
        return self._model.forward(rows, moves=self.parts.cache.take_moves())

    def _begin(self, request: DraftRequest) -> Guessing | None:
        """Make room for a sequence and its guesses; None where there is none."""
        cache, sequence_id, known = self.parts.cache, request.sequence_id, request.token_ids
        held = self._held.setdefault(sequence_id, _Held())
        max_len = self.parts.engine.max_model_len
        assert max_len is not None
        wanted = min(request.wanted, max_len - len(known))
        held.agree(known)
        if held.has_pages:
            cache.rewind(sequence_id, held.num_accepted)
            cache.commit(sequence_id, known, held.num_accepted)
        if wanted < 1:
            return None
        found = cache.reserve(sequence_id, known, len(known) + wanted - 1, held.salt)
        if found is None:
            self._figures["no_room"] += 1
            return None
        held.has_pages = True
        # A prefix that another sequence ran is found the first time.
        held.num_accepted = max(held.num_accepted, found)
        return Guessing(request, held.num_accepted, wanted, cache.pages(sequence_id))

    def _caught_up(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._held[row.sequence_id].num_accepted += len(row.token_ids)
            self._figures["caught_up_tokens"] += len(row.token_ids)


def _no_progress(what: str, done: int, total: int) -> None:
    del what, done, total


def _part(one: Guessing, num_tokens: int) -> Row:
    """Return a row of the first tokens that the model lacks, after which nothing is guessed."""
    ids = tuple(one.request.token_ids[one.begin : one.begin + num_tokens])
    return Row(sequence_id=one.request.sequence_id, token_ids=ids, start=one.begin, want=Want.NONE, pages=one.pages)


def build(context: DrafterContext) -> Drafter:
    """Compose the second model, and check that its tokens are the target's.

    Raises:
        ConfigError: no model is named.
        CompositionError: the two models' vocabularies differ; names both.
    """
    options: DraftModelOptions = context.options
    if not options.model:
        raise ConfigError("drafter.model: no model is given; a name, a path or a hub id", field="drafter.model")
    engine = {} if options.dtype == "auto" else {"dtype": options.dtype}
    weights = {"quantizer": options.quantizer} if options.quantizer else {}
    parts: Parts = context.load_model(options.model, cache={"memory": options.memory}, engine=engine, **weights)
    _check_vocabularies(context, parts, options.model)
    return controlled(DraftModel(parts), k=options.k, adaptive=options.adaptive)


def _check_vocabularies(context: DrafterContext, parts: Parts, model: str) -> None:
    """One model's ids must be the other's."""
    told = partial(CompositionError, field="drafter.model")
    if parts.num_ids != context.num_ids:
        raise told(
            f"drafter.model: {model!r} has {parts.num_ids} token ids and the target ({context.spec.family}) has "
            f"{context.num_ids}; a drafter's model has the target's vocabulary"
        )
    mine: TokenizerView | None = parts.tokenizer
    if mine is None or context.tokenizer is None or mine.spec.definition == context.tokenizer.spec.definition:
        return
    for token in range(context.num_ids):
        ours, theirs = mine.token_bytes(token), context.tokenizer.token_bytes(token)
        if ours != theirs:
            raise told(
                f"drafter.model: token {token} is {ours!r} to {model!r} and {theirs!r} to the target "
                f"({context.spec.family}); a drafter's model has the target's vocabulary"
            )
