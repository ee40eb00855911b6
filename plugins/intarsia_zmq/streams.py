"""One request's outgoing side: what it says, numbered, kept until it is confirmed, and held back without credit."""

from __future__ import annotations

from collections import deque

from attrs import define, field

from intarsia.errors import IntarsiaError, InvalidRequestError
from intarsia.types import Output, Timings, TokenLogprobs, Usage
from intarsia_zmq.errors import SlowReaderError, write_error
from intarsia_zmq.messages import choice_body, delta_body, done_body
from intarsia_zmq.verbs import wrong
from intarsia_zmq.wire import Frames, pack

#: About what an entry of log-probabilities takes in memory, and each likeliest token in it.
_ENTRY_BYTES = 96
#: About what a token id takes in memory.
_ID_BYTES = 8


@define(eq=False)
class Piece:
    """What a choice has to say from several outputs: joined, or in a whole answer all that it says."""

    texts: list[str] = field(factory=list)
    token_ids: list[int] = field(factory=list)
    logprobs: list[TokenLogprobs] = field(factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(factory=list)
    finish_reason: str | None = None

    @property
    def text(self) -> str:
        """All of its text."""
        return "".join(self.texts)

    def add(self, output: Output) -> None:
        """Take what an output brings."""
        if output.text:
            self.texts.append(output.text)
        self.token_ids.extend(output.token_ids)
        self.logprobs.extend(output.logprobs)
        self.prompt_logprobs.extend(output.prompt_logprobs)
        self.finish_reason = output.finish_reason


def size_of(said: Output | Piece) -> int:
    """Return about how many bytes of memory it takes to keep this."""
    text = said.text
    num_bytes = _ID_BYTES * len(said.token_ids) + (len(text) if text.isascii() else len(text.encode()))
    if said.logprobs or said.prompt_logprobs:
        num_bytes += _ENTRY_BYTES * sum(1 + len(entry.top) for entry in (*said.logprobs, *said.prompt_logprobs))
    return num_bytes


@define(eq=False, kw_only=True)
class Stream:
    """One request, as far as its client is concerned.

    It takes the request's outputs and gives messages. It knows no clock and no socket; one thread calls it.

    Attributes:
        request_id: the client's own.
        key: the engine's id of the same request.
        num_choices: how many choices have to end.
        whole: send no deltas: everything comes in `done`.
        upto: deltas up to this `seq` may be sent.
        max_window: what may be granted beyond what is confirmed.
        buffer_bytes: what it may hold for the client.
        stall_timeout_s: how long it may want credit.
        overdue: its deadline has passed: where it is aborted, it says `deadline`.
    """

    request_id: str
    key: str
    num_choices: int = 1
    whole: bool = False
    upto: int = 256
    max_window: int = 1024
    buffer_bytes: int = 8 << 20
    stall_timeout_s: float = 60.0
    overdue: bool = False
    #: the number of the last message
    seq: int = field(default=0, init=False)
    #: the last number that the client has confirmed
    received: int = field(default=0, init=False)
    #: whether its last message, `done` or `error`, has been made
    ended: bool = field(default=False, init=False)
    #: sent and not confirmed: (its number, its frames, their bytes)
    _kept: deque[tuple[int, Frames, int]] = field(factory=deque, init=False)
    #: choice -> what it has to say, one output as it is; the one that has waited longest is first
    _pending: dict[int, Output | Piece] = field(factory=dict, init=False)
    _pending_bytes: int = field(default=0, init=False)
    #: choice -> its last output
    _finals: dict[int, Output] = field(factory=dict, init=False)
    _kept_bytes: int = field(default=0, init=False)
    _failure: IntarsiaError | None = field(default=None, init=False)
    _blocked_since: float | None = field(default=None, init=False)

    @property
    def num_bytes(self) -> int:
        """About how many bytes it holds for the client."""
        return self._kept_bytes + self._pending_bytes

    @property
    def settled(self) -> bool:
        """Whether the client has confirmed the end: there is nothing left to do."""
        return self.ended and self.received >= self.seq

    @property
    def closed(self) -> bool:
        """Whether it takes no more: all choices have ended, or it failed. Its end may still wait for credit."""
        return self._failure is not None or len(self._finals) == self.num_choices

    # --- from the engine ----------------------------------------------------------------------------------------------

    def take(self, output: Output) -> None:
        """Take what a step brought for a choice. What comes after the choice's end, or a failure, is dropped."""
        choice = output.choice
        if self._failure is not None or choice in self._finals:
            return
        said = self._pending.get(choice)
        if said is None and not self.whole:
            self._pending[choice] = output
        else:
            if not isinstance(said, Piece):
                made = self._pending[choice] = Piece()
                if said is not None:
                    made.add(said)
                said = made
            said.add(output)
        self._pending_bytes += size_of(output)
        if output.finish_reason is not None:
            self._finals[choice] = output

    def abort(self) -> None:
        """End the choices that have not ended: the engine has never seen the request, or sees no more of it."""
        for choice in range(self.num_choices):
            self.take(Output(request_id=self.key, choice=choice, finish_reason="abort"))

    def fail(self, error: IntarsiaError) -> None:
        """End with an error. What was not sent is dropped; after `done` or another error nothing happens."""
        if not self.ended and self._failure is None:
            self._failure = error
            self._pending.clear()
            self._pending_bytes = 0

    # --- to the client ------------------------------------------------------------------------------------------------

    def due(self) -> list[Frames]:
        """Return the messages that may be sent now, encoded; they count as sent, and are kept until confirmed."""
        if self.ended:
            return []
        if self._failure is not None:
            self.ended = True
            return [self._keep("error", write_error(self._failure))]
        made = []
        if not self.whole:
            while self._pending and self.seq < self.upto:
                choice = next(iter(self._pending))
                said = self._pending.pop(choice)
                self._pending_bytes -= size_of(said)
                made.append(self._delta(choice, said))
        if len(self._finals) == self.num_choices and (self.whole or not self._pending):
            self.ended = True
            made.append(self._keep("done", self._done()))
        return made

    def acknowledge(self, received: int, upto: int) -> None:
        """Take a `credit`: drop what is confirmed, and grant more. Less than before changes nothing.

        Raises:
            InvalidRequestError: it confirms what was not sent, or grants more than a window; nothing has changed.
        """
        if received > self.seq:
            raise wrong("received", received, f"a seq that was sent; the last is {self.seq}")
        confirmed = max(received, self.received)
        if upto > confirmed + self.max_window:
            raise wrong("upto", upto, f"at most {self.max_window} beyond received, which is {confirmed}")
        if upto > self.upto:
            self.upto = upto
            self._blocked_since = None
        self._confirm(confirmed)

    def resume(self, received: int | None) -> list[Frames]:
        """Return what was sent after `received`, to be sent again; None is all that was not confirmed.

        Raises:
            InvalidRequestError: `received` was not sent, or lies before what was confirmed.
        """
        self._blocked_since = None
        if received is not None:
            if not self.received <= received <= self.seq:
                right = f"a seq that was sent and not confirmed: from {self.received} to {self.seq}"
                raise wrong(f"received.{self.request_id}", received, right)
            self._confirm(received)
        return [frames for _, frames, _ in self._kept]

    def fault(self, now: float) -> IntarsiaError | None:
        """Return why the request has to end, if its client takes it too slowly. Asked while the client is there."""
        if self.stalled(now):
            return SlowReaderError(f"nothing was granted for {self.stall_timeout_s:g} s: stall_timeout_s is over")
        return self.surplus() if self.overfull else None

    @property
    def overfull(self) -> bool:
        """Whether it holds more than it may."""
        return not self.ended and self.num_bytes > self.buffer_bytes

    def surplus(self) -> IntarsiaError:
        """Return the error of a stream that holds too much."""
        if self.whole:
            text = f"stream: the whole answer outgrows {self.buffer_bytes} bytes, this server's buffer_bytes; stream it"
            return InvalidRequestError(text, field="stream")
        return SlowReaderError(
            f"{self.num_bytes} bytes wait to be read or confirmed; buffer_bytes is {self.buffer_bytes}"
        )

    def stalled(self, now: float) -> bool:
        """Whether it has had something to say and no credit for too long, as far as it was asked."""
        if self.whole or self.ended or not self._pending or self.seq < self.upto:
            self._blocked_since = None
            return False
        if self._blocked_since is None:
            self._blocked_since = now
        return now - self._blocked_since >= self.stall_timeout_s

    # --- within -------------------------------------------------------------------------------------------------------

    def _delta(self, choice: int, said: Output | Piece) -> Frames:
        reason = None if said.finish_reason is None else self._reason(said.finish_reason)
        body = delta_body(choice, said.text, said.token_ids, said.logprobs, said.prompt_logprobs, reason)
        return self._keep("delta", body)

    def _reason(self, finish_reason: str) -> str:
        return "deadline" if self.overdue and finish_reason == "abort" else finish_reason

    def _keep(self, kind: str, body: dict[str, object]) -> Frames:
        self.seq += 1
        frames = pack(kind, self.request_id, self.seq, body)
        size = len(frames[0]) if len(frames) == 1 else sum(map(len, frames))
        self._kept.append((self.seq, frames, size))
        self._kept_bytes += size
        return frames

    def _confirm(self, received: int) -> None:
        self.received = received
        while self._kept and self._kept[0][0] <= received:
            self._kept_bytes -= self._kept.popleft()[2]

    def _done(self) -> dict[str, object]:
        choices, scored = [], []
        for choice in range(self.num_choices):
            final, said = self._finals[choice], self._pending.pop(choice, None)
            whole = None
            if isinstance(said, Piece):
                whole = (said.text, said.token_ids, said.logprobs)
                scored += said.prompt_logprobs
            choices.append(choice_body(choice, self._reason(str(final.finish_reason)), final.error, whole))
        self._pending_bytes = 0
        return done_body(choices, *self._totals(), scored)

    def _totals(self) -> tuple[Usage, Timings, int]:
        """Return usage and timings over all choices, and the seed."""
        finals = list(self._finals.values())
        usages = [final.usage for final in finals if final.usage is not None] or [Usage(0, 0)]
        timings = [final.timings for final in finals if final.timings is not None] or [Timings(0.0, 0.0, 0.0)]
        usage = Usage(
            prompt_tokens=max(each.prompt_tokens for each in usages),
            completion_tokens=sum(each.completion_tokens for each in usages),
            cached_tokens=usages[0].cached_tokens,
        )
        timing = Timings(
            queued_s=min(each.queued_s for each in timings),
            first_token_s=min(each.first_token_s for each in timings),
            total_s=max(each.total_s for each in timings),
        )
        return usage, timing, next((final.seed for final in finals if final.seed), 0)
