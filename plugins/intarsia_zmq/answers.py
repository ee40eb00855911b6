"""From what comes for a request to what a caller gets: outputs as an engine gives them, and completions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, cast

from attrs import define, evolve, field, frozen

from intarsia.errors import IntarsiaError, InvalidRequestError
from intarsia.types import Chat, Completion, CompletionChoice, Output, Prompt, Request, SamplingParams
from intarsia_zmq.calls import Event
from intarsia_zmq.errors import MalformedError
from intarsia_zmq.link import Link
from intarsia_zmq.messages import Done
from intarsia_zmq.requests import Generate


@frozen
class Pong:
    """How a server is.

    Attributes:
        state: starting, ready, draining, paused, failed.
        step_age_s: seconds since the engine's last step ended; None where it has no work.
        round_trip_s: seconds from asking to knowing.
    """

    state: str
    step_age_s: float | None
    round_trip_s: float


@define(eq=False)
class Answer:
    """What has come of one request.

    Attributes:
        request: what was asked.
        deltas: how many were taken from it.
        done: the end, once it has come.
        failure: why there is none.
    """

    request: Request
    deltas: int = field(default=0, init=False)
    done: Done | None = field(default=None, init=False)
    failure: IntarsiaError | None = field(default=None, init=False)
    _open: int = field(init=False)
    #: last outputs of choices, which lack what only the end says
    _held: list[Output] = field(factory=list, init=False)

    def __attrs_post_init__(self) -> None:
        self._open = self.request.params.n

    @property
    def ended(self) -> bool:
        """Whether nothing more comes."""
        return self.done is not None or self.failure is not None

    def take(self, events: Iterable[Event]) -> list[Output]:
        """Take what came and return the outputs that are ready.

        The last output of all has usage, timings and seed of the whole request, as `done` has them. It is held back
        until then, as is that of a choice that failed, for the reason.
        """
        ready = []
        for event in events:
            if type(event) is Output:
                self.deltas += 1
                if event.finish_reason is None:
                    ready.append(event)
                    continue
                self._open -= 1
                last = self._open <= 0 or event.finish_reason == "error"
                (self._held if last else ready).append(event)
            elif isinstance(event, Done):
                self.done = event
                ready += [self._completed(output, event) for output in self._held]
            elif isinstance(event, IntarsiaError):
                self.failure = event
                ready += self._held
        return ready

    def _completed(self, output: Output, done: Done) -> Output:
        choices = done.choices
        error = choices[output.choice].error if output.choice < len(choices) else None
        if output is not self._held[-1]:
            return evolve(output, error=error)
        return evolve(output, error=error, usage=done.usage, timings=done.timings, seed=done.seed)


@define(eq=False)
class Gathering:
    """The answers of several requests, in their order."""

    _asking: Asking
    _answers: dict[str, Answer] = field(factory=dict, init=False)
    _outputs: dict[str, list[Output]] = field(factory=dict, init=False)
    _left: set[str] = field(factory=set, init=False)

    @property
    def names(self) -> Iterable[str]:
        """Ids of the requests."""
        return self._answers.keys()

    @property
    def ended(self) -> bool:
        """Whether all have ended."""
        return not self._left

    def add(self, request: Request) -> None:
        """Wait for one more."""
        name = request.request_id
        self._answers[name], self._outputs[name] = Answer(request), []
        self._left.add(name)

    def take(self, name: str, events: Sequence[Event]) -> None:
        """Take what came for one of them.

        Raises:
            IntarsiaError: it failed.
        """
        answer = self._answers[name]
        before = answer.deltas
        self._outputs[name] += answer.take(events)
        if answer.ended:
            self._left.discard(name)
        elif answer.deltas > before:
            self._asking.took(name, answer.deltas - before)
        if answer.failure is not None:
            raise answer.failure

    def cancel(self) -> None:
        """Let those that have not ended go."""
        for name in self._left:
            self._asking.cancelled(name)

    def completions(self) -> list[Completion]:
        """Return the answers, once all have ended."""
        return [
            completion(answer.request, self._outputs[name], cast("Done", answer.done))
            for name, answer in self._answers.items()
        ]


def completion(request: Request, outputs: Sequence[Output], done: Done) -> Completion:
    """Return a finished request as `Engine.generate` does; the prompt's ids only where they were given.

    Raises:
        MalformedError: the end does not fit what was asked.
    """
    params, prompt = request.params, request.prompt
    if len(done.choices) != params.n:
        raise MalformedError(f"done: {len(done.choices)} choices, of {params.n}", field="choices")
    whole = not outputs
    scored = done.prompt_logprobs if whole else [entry for output in outputs for entry in output.prompt_logprobs]
    choices = [
        choice if whole else _joined(choice, [output for output in outputs if output.choice == index])
        for index, choice in enumerate(done.choices)
    ]
    return Completion(
        request_id=request.request_id,
        prompt_token_ids=tuple(cast("Sequence[int]", prompt)) if _is_ids(prompt) else (),
        choices=tuple(evolve(c, logprobs=None if params.logprobs is None else c.logprobs or ()) for c in choices),
        usage=done.usage,
        timings=done.timings,
        seed=done.seed,
        prompt_logprobs=None if params.prompt_logprobs is None else (None, *(scored or ())),
    )


def _joined(end: CompletionChoice, outputs: Sequence[Output]) -> CompletionChoice:
    return evolve(
        end,
        text="".join(output.text for output in outputs),
        token_ids=tuple(token for output in outputs for token in output.token_ids),
        logprobs=tuple(entry for output in outputs for entry in output.logprobs),
    )


# --- what is asked ----------------------------------------------------------------------------------------------------


@frozen
class Asking:
    """How a client's calls become requests.

    Attributes:
        link: to the server.
        credit: the window of each, in deltas; None is the server's.
    """

    link: Link
    credit: int | None = None

    @property
    def step(self) -> int:
        """After how many deltas a reader says that it has read them: often enough for half a window to be known."""
        welcome = self.link.connection.welcome
        return max(1, (self.credit or (1 if welcome is None else welcome.served.credit)) // 4)

    def took(self, name: str, count: int) -> None:
        """Tell the connection that so many deltas more were read."""
        self.link.tell(self.link.connection.take, name, count)

    def cancelled(self, name: str) -> None:
        """Tell the connection that nobody waits for a request any more."""
        self.link.tell(self.link.connection.cancel, name)

    def one(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        *,
        stream: bool,
        priority: int,
        cache_salt: str,
        deadline_s: float | None,
    ) -> Generate:
        """Return what to ask for; raise InvalidRequestError where it is nothing that can be asked."""
        listed = hasattr(prompt, "tolist")
        request = Request(
            request_id=self.link.new_name(),
            prompt=cast("Any", prompt).tolist() if listed else prompt,
            params=SamplingParams() if params is None else params,
            priority=priority,
            cache_salt=cache_salt,
        )
        _check_prompt(request.prompt)
        return Generate(request=request, stream=stream, deadline_s=deadline_s, credit=self.credit)

    def many(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        priority: int,
        cache_salt: str,
        deadline_s: float | None,
    ) -> list[Generate]:
        """Return what to ask for each prompt of a list, or for the one that it is.

        Answers come whole, in one message; with log-probabilities as a stream, since a server keeps whole answers
        within bounds.
        """
        asked = [prompts] if is_one(prompts) else list(cast("Sequence[Prompt]", prompts))
        each = [params] * len(asked) if params is None or isinstance(params, SamplingParams) else list(params)
        if len(each) != len(asked):
            raise InvalidRequestError(
                f"params: {len(each)} for {len(asked)} prompts; give one, or one a prompt", field="params"
            )
        return [
            self.one(
                cast("Prompt", prompt),
                one,
                stream=one is not None and (one.logprobs is not None or one.prompt_logprobs is not None),
                priority=priority,
                cache_salt=cache_salt,
                deadline_s=deadline_s,
            )
            for prompt, one in zip(asked, each, strict=True)
        ]


def is_one(prompts: object) -> bool:
    """Whether this is one prompt: a text, a chat, ids or messages, and not a list of prompts."""
    if isinstance(prompts, str | Chat):
        return True
    if hasattr(prompts, "tolist"):
        prompts = prompts.tolist()
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes | bytearray):
        _check_prompt(prompts)
    listed = list(cast("Sequence[Any]", prompts))
    return _is_ids(listed) or (bool(listed) and all(isinstance(item, Mapping) for item in listed))


def _is_ids(prompt: object) -> bool:
    if isinstance(prompt, str | bytes | bytearray | Chat) or not isinstance(prompt, Sequence) or not prompt:
        return False
    return all(isinstance(item, Integral) and not isinstance(item, bool) for item in prompt)


def _check_prompt(prompt: object) -> None:
    if isinstance(prompt, str | Chat) or _is_ids(prompt):
        return
    if isinstance(prompt, Sequence) and not isinstance(prompt, bytes | bytearray):
        if all(isinstance(item, Mapping) for item in prompt):
            return  # one that is empty is for the server to refuse
        wrong = next(item for item in prompt if not isinstance(item, Mapping))
    else:
        wrong = prompt
    shown = repr(wrong)[:80]
    raise InvalidRequestError(
        f"prompt: {shown} is no prompt, nor a token id in one; a prompt is text, token ids or a list of messages",
        field="prompt",
    )
