"""The `structured_output` logits processor, by llguidance.

llguidance (MIT, from Microsoft and the guidance project) was chosen over xgrammar (Apache-2.0): it is one wheel without
dependencies, where xgrammar brings transformers, pydantic and TVM's runtime; it refuses what it cannot follow of JSON
Schema, where xgrammar 0.2.9 lets answers break `uniqueItems` and `multipleOf`; it bounds the work of compiling and of
each mask, and reports errors as states. Both compile in milliseconds. What its bounds miss, the sandbox holds: see
`sandbox.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from attrs import define, field, frozen

from intarsia.errors import ExecutionError
from intarsia.protocols import PartContext, TokenizerView
from intarsia.types import SamplingParams
from intarsia_structured.compiler import Compiled, Compiler
from intarsia_structured.constraint import constraint_of
from intarsia_structured.grammar import GrammarError, Vocabulary, check
from intarsia_structured.options import StructuredOptions

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: A byte of a mask -> the ceilings of its eight logits: none where the bit is set. A minimum with them masks in one
#: pass without branches, whatever the mask, and keeps NaN for the sampler to find.
_CEILINGS = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little") == 1,
    np.float32(np.inf),
    np.float32(-np.inf),
)


@frozen(eq=False)
class StructuredOutput:
    """Masks the logits of requests that ask for a structure."""

    options: StructuredOptions
    compiler: Compiler

    def applies(self, params: SamplingParams) -> bool:
        """Whether a request asks for a structure.

        Raises:
            InvalidRequestError: it asks for something else, or for what cannot be.
        """
        return constraint_of(params, self.options.max_schema_bytes) is not None

    def prepare(self, params: SamplingParams) -> Future[object] | None:
        """Begin to compile a request's structure; None where it is at hand."""
        future: Future[Any] = self._compiled(params)
        return None if future.done() and not future.cancelled() and future.exception() is None else future

    def open(self, params: SamplingParams, num_prompt: int) -> StructuredSequence:
        """Return what masks one sequence. Waits, where so many structures came since that this one was dropped.

        Raises:
            InvalidRequestError: the structure cannot be compiled.
        """
        compiled = self._compiled(params).result()
        return StructuredSequence(compiled, num_prompt, self.compiler.vocabulary)

    def _compiled(self, params: SamplingParams) -> Future[Compiled]:
        constraint = constraint_of(params, self.options.max_schema_bytes)
        assert constraint is not None, "asked of a request that it does not apply to"
        return self.compiler.compiled(constraint)


@define(eq=False)
class StructuredSequence:
    """Masks one sequence. What it keeps, a matcher that has consumed the answer's ids, is for speed alone.

    While the structure is incomplete, end-of-sequence ids are forbidden; when it is complete they are allowed, all of
    them, besides what can go on. After one of them, or after ids that break the structure, such as drafts that will be
    rejected, they alone are allowed.
    """

    _compiled: Compiled
    _num_prompt: int
    _vocabulary: Vocabulary
    _matcher: Any = field(init=False)
    _consumed: list[int] = field(factory=list, init=False)
    _eos_ids: frozenset[int] = field(init=False)
    _only_eos: NDArray[np.uint8] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._matcher = self._compiled.matcher()
        self._eos_ids = frozenset(self._vocabulary.eos_ids)
        allowed = np.isin(np.arange(len(self._vocabulary.tokens)), self._vocabulary.eos_ids)
        self._only_eos = np.packbits(allowed, bitorder="little")

    def process(self, token_ids: Sequence[int], logits_V: torch.Tensor) -> None:
        """Forbid what breaks the structure, in place.

        Args:
            token_ids: prompt, answer and drafts before this position.
            logits_V: fp32; ids beyond the tokenizer's are forbidden too.

        Raises:
            ExecutionError: the structure takes more work here than llguidance's limits allow, or no token of the model
                can go on with it.
        """
        size = len(self._vocabulary.tokens)
        ceilings = _CEILINGS.take(self._allowed(list(token_ids[self._num_prompt :])), axis=0).reshape(-1)[:size]
        known = logits_V[:size]
        if known.device.type == "cpu":
            np.minimum(known.numpy(), ceilings, out=known.numpy())
        else:
            torch.minimum(known, torch.from_numpy(ceilings).to(known.device), out=known)
        logits_V[size:] = -torch.inf

    def _allowed(self, answer: list[int]) -> NDArray[np.uint8]:
        """Return which ids may follow an answer, a bit an id, the lowest bit first."""
        try:
            if not self._follow(answer):
                return self._only_eos
            packed = self._matcher.compute_bitmask()
            check(self._matcher)
        except GrammarError as error:
            # A matcher that has failed never recovers.
            self._begin_again()
            raise ExecutionError(f"{self._compiled.constraint.field}: {error}") from None
        return np.frombuffer(packed, np.uint8)

    def _follow(self, answer: list[int]) -> bool:
        """Bring the matcher to the end of an answer; return whether the answer follows the structure, still open."""
        kept = _common(self._consumed, answer)
        if kept < len(self._consumed):
            self._rewind(kept)
        rest = answer[len(self._consumed) :]
        if not self._eos_ids.isdisjoint(rest):
            return False
        if rest:
            done = self._matcher.try_consume_tokens(rest)
            check(self._matcher)
            self._consumed += rest[:done]
            return bool(done == len(rest))
        return True

    def _rewind(self, kept: int) -> None:
        if not self._compiled.resumable or not self._matcher.rollback(len(self._consumed) - kept):
            self._begin_again()
        else:
            del self._consumed[kept:]

    def _begin_again(self) -> None:
        self._matcher = self._compiled.matcher()
        self._consumed = []


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the longest common prefix."""
    if other[: len(one)] == one:  # by far the most frequent, and in C
        return len(one)
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def vocabulary_of(tokenizer: TokenizerView, num_ids: int) -> Vocabulary:
    """Return the bytes of a tokenizer's ids; ids from `num_ids` on cannot be chosen and are left out."""
    names = _special_names(tokenizer.spec.definition)
    eos_ids = tuple(dict.fromkeys(one for one in tokenizer.eos_ids if 0 <= one < num_ids))
    tokens = [tokenizer.token_bytes(one) if one < tokenizer.vocab_size else b"" for one in range(num_ids)]
    # An end-of-sequence id ends, whatever text it may have: none that is part of a text may match it.
    special = [one for one, text in enumerate(tokens) if (not text and one in names) or one in eos_ids]
    for one in special:
        tokens[one] = names.get(one, f"<|{one}|>").encode()
    return Vocabulary(tokens=tokens, special_ids=tuple(special), eos_ids=eos_ids)


def _special_names(definition: str) -> Mapping[int, str]:
    """Return the added tokens of a tokenizer.json by id."""
    added = json.loads(definition).get("added_tokens") or ()
    return {token["id"]: token["content"] for token in added}


def build(context: PartContext) -> StructuredOutput:
    """Make the processor of an engine. Nothing is started before the first request that asks."""
    assert context.tokenizer is not None, "`fit` refuses a model without a tokenizer"
    vocabulary = vocabulary_of(context.tokenizer, context.num_ids)
    return StructuredOutput(context.options, Compiler(vocabulary, context.options))
