"""How a logits processor's contract runs it: on rows of a small vocabulary, for requests that it applies to.

Shape legend: V ids that can be chosen, L logits of a padded vocabulary.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, ClassVar

from attrs import evolve

from intarsia.errors import InvalidRequestError
from intarsia.protocols import LogitsProcessor, PartContext, SequenceProcessor
from intarsia.testing.caches import tiny_spec
from intarsia.testing.claims import settle
from intarsia.testing.engines import configured, unharmed
from intarsia.testing.tiny_tokenizer import END_ID, NUM_TOKENS, byte_tokenizer
from intarsia.types import EngineOptions, Fit, Provider, SamplingParams

if TYPE_CHECKING:
    import torch

__all__ = ["GARBAGE", "NUM_LOGITS", "PROMPT", "ProcessorCase", "outcome", "refusal", "row_at"]

#: Logits of a row with those of a padded vocabulary, of which the first `NUM_TOKENS` are of tokens.
NUM_LOGITS = NUM_TOKENS + 7
#: What answers follow.
PROMPT = (72, 101, END_ID, 72, 101)


def _nested(depth: int) -> list[Any]:
    nested: list[Any] = []
    for _ in range(depth):
        nested = [nested]
    return nested


#: What a request can say under a processor's key, and nobody means.
GARBAGE: tuple[Any, ...] = (3, -1, True, 1.5, math.nan, "", "x" * 5000, b"x", [], [1, "a"], {}, {"no_such_option": 1})
GARBAGE += ({1: 2}, {"": None}, {"x" * 5000: {}}, _nested(100), {"a": _nested(100)}, object())


class ProcessorCase:
    """A logits processor on trial: subclasses say whose provider it is, and what requests say to it.

    Attributes:
        options: the processor's own, as a config has them.
        asked: what requests that it applies to say under its key; None is a request that says nothing.
        refused: what it cannot do: a request that says this is refused, when it comes or once it is prepared.
        patience_s: seconds that it may take to prepare a request.
    """

    options: ClassVar[Mapping[str, Any]] = {}
    asked: ClassVar[Sequence[Any]] = (None,)
    refused: ClassVar[Sequence[Any]] = ()
    patience_s: ClassVar[float] = 30.0

    def provider(self) -> Provider:
        """Return the processor's provider."""
        raise NotImplementedError("return the provider of the logits processor on trial")

    # --- for the claims ---------------------------------------------------------------------------------------------

    def build(self) -> LogitsProcessor:
        """Return a new processor, for a model whose tokens are bytes."""
        from intarsia.text import Tokenizer

        provider = self.provider()
        context = PartContext(
            options=configured(settle, provider, "logits_processors", dict(self.options)),
            engine=EngineOptions(max_model_len=128, device="cpu", dtype="float32", threads=1),
            spec=evolve(tiny_spec(), vocab_size=NUM_LOGITS),
            num_ids=NUM_TOKENS,
            tokenizer=Tokenizer.from_spec(byte_tokenizer()),
        )
        found = provider.fit(context)
        assert isinstance(found, Fit), f"it does not fit a plain model: {found.reason}"
        built: LogitsProcessor = provider.build(context)
        return built

    def request(self, says: Any, **params: Any) -> SamplingParams:
        """Return the parameters of a request that says this under the processor's key."""
        options = {} if says is None else {self.provider().key: says}
        return SamplingParams(logits_processors=options, **params)

    def requests(self, part: LogitsProcessor) -> list[SamplingParams]:
        """Return the parameters of requests that it applies to."""
        found = [self.request(says) for says in self.asked]
        for params in found:
            if not unharmed("applies", part.applies, params):
                raise NotImplementedError(
                    f"the processor does not apply to a request that says {dict(params.logits_processors)}: let "
                    "`asked` list what requests say under its key"
                )
        return found

    def prepared(self, part: LogitsProcessor, params: SamplingParams) -> None:
        """Let a request's work be done.

        Raises:
            InvalidRequestError: the processor says so.
        """
        future = part.prepare(params)
        assert future is None or isinstance(future, Future), f"prepare returned {future!r}, not a Future or None"
        if future is None:
            return
        try:
            future.result(self.patience_s)
        except TimeoutError:
            raise AssertionError(f"preparing a request takes more than {self.patience_s:g} s") from None

    def opened(self, part: LogitsProcessor, params: SamplingParams, num_prompt: int = len(PROMPT)) -> SequenceProcessor:
        """Return what processes one sequence, as an engine gets it."""
        unharmed("prepare", self.prepared, part, params)
        return unharmed("open", part.open, params, num_prompt)

    def answer(self, part: LogitsProcessor, params: SamplingParams, seed: int, most: int = 24) -> list[int]:
        """Return an answer drawn evenly from what the processor lets through."""
        draws = random.Random(seed)
        ids: list[int] = []
        sequence = self.opened(part, params)
        for _ in range(most):
            row_V = row_at(len(ids), seed)
            unharmed("process", sequence.process, [*PROMPT, *ids], row_V)
            left = row_V.isfinite().nonzero().flatten().tolist()
            assert left, f"after {ids} no token is allowed"
            ids.append(draws.choice(left))
            if ids[-1] == END_ID:
                break
        return ids


def row_at(position: int, seed: int = 0) -> torch.Tensor:
    """Return the logits (V,) at a position: random, and the same each time."""
    import torch

    generator = torch.Generator().manual_seed(1000 * seed + position)
    return torch.randn(NUM_TOKENS, generator=generator)


def outcome(sequence: SequenceProcessor, ids: Sequence[int], seed: int = 0) -> bytes | str:
    """Return the bits of the logits after these ids, or what is raised: behind a rejected draft that harms nobody."""
    row_V = row_at(len(ids), seed)
    try:
        sequence.process(list(ids), row_V)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return row_V.numpy().tobytes()


def refusal(call: Callable[..., object], *args: Any) -> InvalidRequestError | None:
    """Return how a request is refused, or None; anything else that is raised is a fault."""
    try:
        call(*args)
    except InvalidRequestError as error:
        return error
    except AssertionError:
        raise
    except Exception as error:
        raise AssertionError(
            f"{type(error).__name__}: {error}; what is wrong with a request is told by InvalidRequestError"
        ) from error
    return None
