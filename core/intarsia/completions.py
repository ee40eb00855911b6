"""Putting the outputs of a finished request together."""

from __future__ import annotations

from collections.abc import Sequence as SequenceABC

from intarsia.sequence import Sequence
from intarsia.types import Completion, CompletionChoice, Output, Timings, TokenLogprobs, Usage


def collect(sequences: SequenceABC[Sequence], outputs: SequenceABC[Output]) -> Completion:
    """Return the completion of a request: its finished sequences, one a choice, and all that they put out."""
    first = sequences[0]
    last = [next(o for o in outputs if o.choice == s.choice and o.finish_reason is not None) for s in sequences]
    usages = [o.usage for o in last if o.usage is not None]
    timings = [o.timings for o in last if o.timings is not None]
    return Completion(
        request_id=first.request.request_id,
        prompt_token_ids=tuple(first.token_ids[: first.num_prompt]),
        choices=tuple(_choice(s, [o for o in outputs if o.choice == s.choice]) for s in sequences),
        usage=Usage(
            prompt_tokens=first.num_prompt,
            completion_tokens=sum(usage.completion_tokens for usage in usages),
            cached_tokens=usages[0].cached_tokens,
        ),
        timings=Timings(
            queued_s=min(t.queued_s for t in timings),
            first_token_s=min(t.first_token_s for t in timings),
            total_s=max(t.total_s for t in timings),
        ),
        seed=first.seed,
        prompt_logprobs=_prompt_logprobs(first, outputs),
    )


def _prompt_logprobs(sequence: Sequence, outputs: SequenceABC[Output]) -> tuple[TokenLogprobs | None, ...] | None:
    if sequence.params.prompt_logprobs is None:
        return None
    return (None, *(entry for output in outputs for entry in output.prompt_logprobs))


def _choice(sequence: Sequence, outputs: SequenceABC[Output]) -> CompletionChoice:
    assert sequence.finish_reason is not None
    logprobs = None
    if sequence.params.logprobs is not None:
        logprobs = tuple(entry for output in outputs for entry in output.logprobs)
    return CompletionChoice(
        text="".join(output.text for output in outputs),
        token_ids=tuple(sequence.token_ids[sequence.num_prompt :]),
        finish_reason=sequence.finish_reason,
        logprobs=logprobs,
        error=next((output.error for output in outputs if output.error), None),
    )
