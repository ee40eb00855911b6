"""A request on its way: what was said of it, and the replica that it is at now.

**What outlives a replica.** A request goes to another replica as it came where nothing of it was said. Where something
was, it is repeated if the same must come again: greedy, or with a seed; a request without a seed gets one from the
router, where a server would have drawn one, so that all are. What comes again is compared with what was said, by
digests, and left out; what follows goes on to the client. An answer that comes out otherwise ends the request with an
error. That can be: on another kind of machine, or at an engine's invariance level below `bitwise`, another batch may
round a near tie the other way.
"""

from __future__ import annotations

from attrs import define, evolve, field

from intarsia.errors import IntarsiaError
from intarsia.types import CompletionChoice, Output, Request, SamplingParams, Timings, Usage
from intarsia_zmq.errors import MalformedError
from intarsia_zmq.handover import Add
from intarsia_zmq.messages import Done
from intarsia_zmq.routing.prefixes import Prefix
from intarsia_zmq.routing.said import Said, brings_something

#: How a choice ends of its own accord.
_ENDS = frozenset(("stop", "length", "error"))


class DivergedError(IntarsiaError):
    """A request that was repeated is answered otherwise."""

    code = "execution"


class UnaskedEndError(IntarsiaError):
    """A replica ended a request that nobody cancelled."""

    code = "execution"


def repeats(params: SamplingParams) -> bool:
    """Whether the same answer comes each time."""
    return params.seed is not None or params.temperature == 0 or params.top_k == 1 or params.top_p == 0


@define(eq=False, kw_only=True)
class Job:
    """A request, from its arrival to its end.

    Attributes:
        add: as it came.
        request: as it goes to replicas.
        prefix: its beginning.
        since: when it came, or lost its replica: how long it may wait for one counts from there.
        said: a choice.
        attempt: at the replica that it is at; None while it waits.
        cancelled: its client, or its deadline, has ended it.
        lost: of replicas that it was at: what happened, the last of all.
        losses: how often it lost one.
        sent_at: when it was first sent to one.
        refusals: replica -> why it is not sent there again.
    """

    add: Add
    request: Request
    prefix: Prefix
    since: float
    said: tuple[Said, ...] = field(init=False)
    ended: set[int] = field(factory=set, init=False)
    attempt: Attempt | None = field(default=None, init=False)
    cancelled: bool = field(default=False, init=False)
    lost: str = field(default="", init=False)
    losses: int = field(default=0, init=False)
    sent_at: float | None = field(default=None, init=False)
    refusals: dict[str, IntarsiaError] = field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        self.said = tuple(Said() for _ in range(self.request.params.n))

    @property
    def key(self) -> str:
        """The server's own id of it."""
        return self.add.request.request_id

    @property
    def silent(self) -> bool:
        """Whether nothing of it was said."""
        return not self.ended and all(said.nothing for said in self.said)

    @property
    def movable(self) -> bool:
        """Whether it can go on at another replica."""
        return self.silent or repeats(self.request.params)

    @property
    def num_tokens(self) -> int:
        """How many ids its client was given, of all choices."""
        return sum(said.num_tokens for said in self.said)

    def aborted(self) -> list[Output]:
        """Return the ends of those choices that have none. Nobody has counted the prompt's tokens exactly."""
        usage = None if self.silent else Usage(self.prefix.tokens, self.num_tokens)
        outputs = [
            Output(request_id=self.key, choice=choice, finish_reason="abort", seed=self.request.params.seed or 0)
            for choice in range(len(self.said))
            if choice not in self.ended
        ]
        return [*outputs[:-1], *(evolve(output, usage=usage) for output in outputs[-1:])]


@define(eq=False, kw_only=True)
class Attempt:
    """A job at one replica: from what that says to what goes on to the client.

    Attributes:
        job: whose it is.
        name: the replica's id of it.
        number: of all that the replica was sent, from 1.
        queued: tokens of its prompt that the replica has yet to compute, as far as is known.
        late_s: seconds that went before it came to this replica, since it first came to one.
        untold: deltas that have come and that the replica has not been told of.
    """

    job: Job
    name: str
    number: int = 0
    queued: int = 0
    late_s: float = 0.0
    untold: int = field(default=0, init=False)
    _before: tuple[Said, ...] = field(init=False)
    _again: tuple[Said, ...] = field(init=False)
    #: choices of which the last delta has come
    _finished: set[int] = field(factory=set, init=False)
    #: last deltas that lack what only the end of all says
    _held: list[Output] = field(factory=list, init=False)

    def __attrs_post_init__(self) -> None:
        self._before = tuple(said.copy() for said in self.job.said)
        self._again = tuple(Said() for _ in self._before)

    def take(self, output: Output) -> list[Output]:
        """Take a delta and return what is new in it.

        Raises:
            MalformedError: it is of a choice that was not asked for, or has ended.
            DivergedError: it is not what was said before.
            UnaskedEndError: the replica ended the request by itself.
        """
        choice, end = output.choice, output.finish_reason
        if not 0 <= choice < len(self._before) or choice in self._finished:
            raise MalformedError(f"choice: {choice} was not asked for, or has ended", field="choice")
        self._check_end(end)
        self.untold += 1
        fresh = evolve(self._fresh(output), request_id=self.job.key)
        if end is not None:
            self._finished.add(choice)
            if not self.job.cancelled and not self._again[choice].reached(self._before[choice]):
                raise self._diverged(choice)
            if end == "error" or not self._open:
                self._held.append(fresh)
                return []
        return self._passed(fresh)

    def end(self, done: Done) -> list[Output]:
        """Take the end and return what is left to say.

        Raises:
            MalformedError, DivergedError, UnaskedEndError: as `take`.
        """
        if len(done.choices) != len(self._before):
            raise MalformedError(f"done: {len(done.choices)} choices, of {len(self._before)}", field="choices")
        streamed = self.job.add.stream
        if streamed and len(self._finished) != len(self._before):
            raise MalformedError("done: a choice has not ended", field="choices")
        said = self._held if streamed else self._whole(done)
        usage = evolve(done.usage, completion_tokens=max(done.usage.completion_tokens, self.job.num_tokens))
        timings = self._since_it_was_sent(done.timings)
        made = [evolve(output, error=done.choices[output.choice].error) for output in said]
        # Those that ended here may have ended before, at another replica: one that is still open says it for all.
        made.sort(key=lambda output: output.choice not in self.job.ended)
        outputs = [
            *made[:-1],
            *(evolve(output, usage=usage, timings=timings, seed=done.seed) for output in made[-1:]),
        ]
        return [each for output in outputs for each in self._passed(output)]

    # --- within -------------------------------------------------------------------------------------------------------

    @property
    def _open(self) -> set[int]:
        """Choices of which more is to come, and goes on to the client."""
        return set(range(len(self._before))) - self._finished - self.job.ended

    def _check_end(self, end: str | None) -> None:
        if end is None or end in _ENDS or (end == "abort" and self.job.cancelled):
            return
        raise UnaskedEndError(f"it ended the request with {end!r:.32}")

    def _fresh(self, output: Output) -> Output:
        """Return what of a delta was not said before."""
        before, again = self._before[output.choice], self._again[output.choice]
        if again.reached(before):
            return output
        head, tail = again.split(before, output)
        again.add(head)
        if again.differs(before) and not self.job.cancelled:
            raise self._diverged(output.choice)
        return tail

    def _diverged(self, choice: int) -> DivergedError:
        count = self._before[choice].num_tokens
        return DivergedError(f"asked again, choice {choice} is answered otherwise than in its first {count} tokens")

    def _since_it_was_sent(self, timings: Timings) -> Timings:
        """Add what went before; where something was said before, this replica's own first token is not the first."""
        late_s = self.late_s if all(said.nothing for said in self._before) else 0.0
        return Timings(timings.queued_s + late_s, timings.first_token_s + late_s, timings.total_s + self.late_s)

    def _whole(self, done: Done) -> list[Output]:
        """Return outputs from an end that brings all there is."""
        for choice in done.choices:
            self._check_end(choice.finish_reason)
        scored = done.prompt_logprobs or ()
        outputs = [self._output(index, choice) for index, choice in enumerate(done.choices)]
        return [evolve(outputs[0], prompt_logprobs=scored), *outputs[1:]]

    def _output(self, index: int, choice: CompletionChoice) -> Output:
        return Output(
            request_id=self.job.key,
            choice=index,
            text=choice.text,
            token_ids=choice.token_ids,
            logprobs=choice.logprobs or (),
            finish_reason=choice.finish_reason,
        )

    def _passed(self, output: Output) -> list[Output]:
        """Note what goes on to the client; a choice that has ended says nothing more."""
        job, choice = self.job, output.choice
        if choice in job.ended or not brings_something(output):
            return []
        job.said[choice].add(output)
        if output.finish_reason is not None:
            job.ended.add(choice)
        return [output]
