"""The rule by which a request finds its replica; the package's page has the formula."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

from attrs import frozen

Policy: TypeAlias = Literal["prefix", "least_loaded", "round_robin"]


@frozen(kw_only=True)
class Candidate:
    """A replica that can take a request.

    Attributes:
        cached: tokens of the request's prompt that it was sent before.
        queued: tokens of other prompts that it has yet to compute.
        requests: answers that it is at, this router's and others'.
        chosen_at: when it was last chosen, as a count of choices; 0 is never.
    """

    cached: int
    queued: int
    requests: int
    chosen_at: int


def choose(policy: Policy, request_tokens: int, prompt_tokens: int, candidates: Sequence[Candidate]) -> int:
    """Return the index of the best; of equal ones, that which was chosen the longest ago.

    Args:
        policy: how to compare.
        request_tokens: how many tokens of a prompt an answer that runs weighs as much as.
        prompt_tokens: of the request.
        candidates: at least one.
    """
    assert candidates, "nobody can take it"

    def rank(index: int) -> tuple[int, int]:
        one = candidates[index]
        if policy == "round_robin":
            return 0, one.chosen_at
        cached = min(one.cached, prompt_tokens) if policy == "prefix" else 0
        return prompt_tokens - cached + one.queued + request_tokens * one.requests, one.chosen_at

    return min(range(len(candidates)), key=rank)
