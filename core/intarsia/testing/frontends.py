"""The contract of frontends, as tests to inherit.

::

    from intarsia.testing.frontends import FrontendContract, free_port

    class TestMine(FrontendContract):
        def provider(self):
            return my_plugin.provide_frontends()[0]

        def places(self, folder):
            return {"port": free_port()}

        def connect(self, frontend):
            return MyClient(frontend.port)      # generate, stream, close, vanish: see FrontendClient

        def drain(self, frontend):
            frontend.stop()

pytest runs the inherited tests. The frontend serves in a thread, over a real engine of a tiny model, which the suite
holds up, slows down and breaks. What clients get is compared with what the engine answers that nobody serves.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

from intarsia.errors import CheckpointError, ConfigError, ExecutionError, IntarsiaError, OverloadedError
from intarsia.testing.claims import unclaimed
from intarsia.testing.composing import BAD_ID, NUM_IDS
from intarsia.testing.frontend_case import FrontendCase, FrontendClient, OutputStream, Served, free_port
from intarsia.testing.leftovers import Held, calling, check_released
from intarsia.testing.watched_engine import MAX_LEN, answered
from intarsia.types import Completion, Output, SamplingParams

__all__ = ["FrontendClient", "FrontendContract", "OutputStream", "free_port"]

_SAFE = {BAD_ID: -100.0}
#: Prompt and params: greedy, seeded, with choices, with log-probabilities of answer and prompt, stopped, one token.
REQUESTS: tuple[tuple[tuple[int, ...], SamplingParams], ...] = (
    ((3, 1, 4, 1, 5), SamplingParams(temperature=0, max_tokens=20, seed=1)),
    ((7,), SamplingParams(temperature=1.0, seed=2**63 + 11, max_tokens=24, logit_bias=_SAFE)),
    (tuple(range(40)), SamplingParams(temperature=0.8, seed=3, n=3, max_tokens=9, logit_bias=_SAFE)),
    ((9, 8, 7, 6), SamplingParams(temperature=0, max_tokens=6, logprobs=2, prompt_logprobs=1, seed=5)),
    ((5, 6, 7), SamplingParams(temperature=0, max_tokens=40, stop_token_ids=tuple(range(30)), seed=0)),
    ((2, 2), SamplingParams(temperature=0, max_tokens=1, repetition_penalty=1.2, seed=9)),
)
_LONG = SamplingParams(temperature=0, max_tokens=MAX_LEN - 20, seed=1)


class FrontendContract(FrontendCase):
    """What every frontend keeps. Subclass it, name the class `Test...`, and say how it is reached.

    What must be said, and what can be said besides, is in `FrontendCase`.
    """

    # --- answers ----------------------------------------------------------------------------------------------------

    def test_it_answers_as_the_engine_does(self) -> None:
        """A request's answer is the engine's: ids, ends, choices, seed, counts, log-probabilities."""
        with self.serving() as served, self.client(served) as client:
            for prompt, params in REQUESTS:
                found = self.in_time(partial(client.generate, prompt, params), "a request")
                self.check(prompt, params, found)

    def test_a_stream_is_the_whole_answer(self) -> None:
        """The outputs of a stream, laid end to end, are the answer; each choice ends once, and says nothing after."""
        with self.serving() as served, self.client(served) as client:
            for prompt, params in REQUESTS:
                outputs = self.in_time(partial(_all_of, client, prompt, params), "a stream")
                self._check_stream(prompt, params, outputs)

    def _check_stream(self, prompt: Sequence[int], params: SamplingParams, outputs: Sequence[Output]) -> None:
        wanted = answered(prompt, params)
        for number, choice in enumerate(wanted.choices):
            own = [output for output in outputs if output.choice == number]
            ids = [token for output in own for token in output.token_ids]
            assert ids == list(choice.token_ids), (
                f"choice {number} streams {ids}, and the engine says {choice.token_ids}"
            )
            ends = [output.finish_reason for output in own]
            assert ends == [*[None] * (len(own) - 1), choice.finish_reason], f"choice {number} ends as {ends}"
            if params.logprobs is not None:
                told = sum(len(output.logprobs) for output in own)
                assert told == len(ids), f"choice {number} has {len(ids)} ids and {told} log-probabilities"
        assert all(output.choice < params.n for output in outputs), "a choice that nobody asked for"
        assert outputs[-1].seed == wanted.seed, f"the seed is {outputs[-1].seed}, and was {wanted.seed}"

    def test_clients_get_their_own_answers(self) -> None:
        """Several clients at once, with equal names for their requests or not, each get what they asked for."""
        with self.serving() as served:

            def ask(number: int) -> None:
                with self.client(served) as client:
                    for prompt, params in REQUESTS[number:] + REQUESTS[:number]:
                        self.check(prompt, params, client.generate(prompt, params))

            asked = [self.asking(partial(ask, number), f"client {number}") for number in range(4)]
            for number, each in enumerate(asked):
                with calling(f"client {number}"):
                    each.result()

    def test_a_slow_reader_holds_up_nobody(self) -> None:
        """While one client does not read its stream others are answered; read at last, the stream is whole."""
        prompt, params = (1, 2, 3), SamplingParams(temperature=0, max_tokens=100, seed=1)
        # At this pace there is still something to say when the reader has looked away, on a busy machine, too.
        with self.serving(pace_s=0.01) as served, self.client(served) as slow, self.client(served) as quick:
            with closing(slow.stream(prompt, params)) as stream:
                outputs = [self.in_time(lambda: next(stream), "the first output")]
                for asked in REQUESTS[:3]:
                    self.check(*asked, self.in_time(partial(quick.generate, *asked), "a request"))
                time.sleep(0.3)
                outputs += self.in_time(lambda: list(stream), "the rest of the stream")
            self._check_stream(prompt, params, outputs)

    def test_one_thread_drives_the_engine(self) -> None:
        """All calls of the engine come from one thread: it is not made for several."""
        with self.serving() as served:
            for _ in range(3):
                with self.client(served) as client:
                    self.in_time(lambda: client.generate(*REQUESTS[0]), "a request")
                    with closing(client.stream((4, 5), _LONG)) as stream:
                        self.in_time(lambda: next(stream), "the first output")
            engine = self.engine(served)
            self.wait_until(lambda: not engine.live, "a stream that was closed runs on")
        assert len(engine.threads) == 1, f"{len(engine.threads)} threads called the engine"

    # --- ends of requests -------------------------------------------------------------------------------------------

    def test_closing_a_stream_cancels_its_request(self) -> None:
        """What nobody reads any more is not computed on, and the others go on."""
        with self.serving(pace_s=0.02) as served, self.client(served) as client, self.client(served) as other:
            stream = client.stream((1, 2, 3), _LONG)
            self.in_time(lambda: next(stream), "the first output")
            engine = self.engine(served)
            assert len(engine.live) == 1, f"one request runs, and the engine has {len(engine.live)}"
            stream.close()
            self.wait_until(lambda: not engine.live, "the request of a stream that was closed runs on")
            for client_, asked in ((client, REQUESTS[0]), (other, REQUESTS[5])):
                found = self.in_time(partial(client_.generate, *asked), "a request")
                self.check(*asked, found)

    def test_a_client_that_vanishes_frees_its_request(self) -> None:
        """A client that is gone without a word is missed soon; its requests end, and the others' go on."""
        with self.serving(pace_s=0.02) as served, self.client(served) as other:
            gone = self._connect(served)
            stream = gone.stream((1, 2, 3), _LONG)
            self.in_time(lambda: next(stream), "the first output")
            engine = self.engine(served)
            begun = engine.steps
            gone.vanish()
            self.check(*REQUESTS[0], self.in_time(lambda: other.generate(*REQUESTS[0]), "a request"))
            self.wait_until(lambda: not engine.live, "the request of a client that is gone runs on")
            assert engine.steps - begun < MAX_LEN - 20, "the request of a client that is gone ran to its end"

    def test_a_request_that_fails_is_told_and_takes_nobody_with_it(self) -> None:
        """One that fails in the engine ends with its error, for whoever asked; the others are answered."""
        params, bad = SamplingParams(temperature=0, max_tokens=5, seed=1), (3, BAD_ID, 4)
        with self.serving() as served, self.client(served) as client, self.client(served) as other:
            with closing(other.stream((1, 2, 3), SamplingParams(temperature=0, max_tokens=60, seed=1))) as stream:
                outputs = [self.in_time(lambda: next(stream), "the first output")]
                for ask in (lambda: client.generate(bad, params), lambda: _all_of(client, bad, params)[-1]):
                    told = self._failure(ask)
                    assert told, "a request that fails in the engine ends as if it had not"
                    assert "not finite" in told, f"the engine says that logits are not finite, and the client {told!r}"
                outputs += self.in_time(lambda: list(stream), "a stream beside a request that fails")
            self._check_stream((1, 2, 3), SamplingParams(temperature=0, max_tokens=60, seed=1), outputs)
            self.check(*REQUESTS[0], self.in_time(lambda: client.generate(*REQUESTS[0]), "a request"))

    def _failure(self, ask: Any) -> str:
        """Return what is told of a failure, in the answer or by an error; nothing where there is none."""
        try:
            found: Completion | Output = self.asking(ask, "a request that fails").result()
        except IntarsiaError as error:
            return str(error)
        return (found.error or "") if found.finish_reason == "error" else ""

    # --- what is refused --------------------------------------------------------------------------------------------

    def test_what_cannot_be_run_is_refused_by_name(self) -> None:
        """No ids, ids that no token has, too many: refused with code `invalid` and words, before any step."""
        params = SamplingParams(temperature=0, max_tokens=4, seed=1)
        wrong: tuple[tuple[str, list[int]], ...] = (
            ("a prompt of no tokens", []),
            ("an id that no token has", [3, NUM_IDS]),
            ("a prompt that is too long", [1] * (MAX_LEN + 1)),
        )
        with self.serving() as served, self.client(served) as client:
            for what, prompt in wrong:
                for ask in (client.generate, partial(_all_of, client)):
                    try:
                        self.asking(partial(ask, prompt, params), what).result()
                    except IntarsiaError as error:
                        assert error.code == "invalid", f"{what} is refused with code {error.code!r}: {error}"
                        assert len(str(error)) > 10, f"{what} is refused with the words {str(error)!r} alone"
                    else:
                        raise AssertionError(f"{what} is answered")
            assert not self.engine(served).steps, "the engine made steps for what cannot be run"
            self.check(*REQUESTS[0], self.in_time(lambda: client.generate(*REQUESTS[0]), "a request"))

    def test_a_full_queue_says_so(self) -> None:
        """What it has no room for is refused as overloaded, with a hint when to retry; the others are answered."""
        with self.serving(**self.crowded) as served, self.client(served) as client:
            self.check(*REQUESTS[5], self.in_time(lambda: client.generate(*REQUESTS[5]), "a request"))
            engine = self.engine(served)
            engine.may_step.clear()
            asked = [self.asking(lambda: self._ask_once(served), "a request among many") for _ in range(48)]
            time.sleep(0.2)
            engine.may_step.set()
            found = [each.result() for each in asked]
            refused = [each for each in found if isinstance(each, IntarsiaError)]
            assert refused, f"{len(asked)} requests were taken at once; `crowded` can say which options make it refuse"
            for error in refused:
                assert isinstance(error, OverloadedError), f"refused with {type(error).__name__}: {error}"
                assert error.retry_after_s > 0, "it does not say when to retry"
            for answer in found:
                if isinstance(answer, Completion):
                    self.check(*REQUESTS[0], answer)

    def _ask_once(self, served: Served) -> Completion | IntarsiaError:
        """Return the answer to a client that comes for one request, or what it is told instead."""
        try:
            with self.client(served) as client:
                return client.generate(*REQUESTS[0])
        except IntarsiaError as error:
            return error

    def test_bytes_that_are_no_message_harm_nobody(self) -> None:
        """Whatever comes to its socket, a running request goes on, and later ones are answered."""
        junk = (b"", b"\x00", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\xff" * 1000, b"{" * 5000, os.urandom(4096))
        with self.serving(pace_s=0.005) as served, self.client(served) as client:
            params = SamplingParams(temperature=0, max_tokens=60, seed=1)
            with closing(client.stream((1, 2, 3), params)) as stream:
                outputs = [self.in_time(lambda: next(stream), "the first output")]
                endpoint = self.endpoint(served.frontend)
                if endpoint is None:
                    unclaimed("endpoint() names no socket")
                for data in junk:
                    with suppress(OSError), _connected(endpoint) as plain:
                        plain.sendall(data)
                        plain.shutdown(socket.SHUT_WR)
                        plain.settimeout(0.1)
                        plain.recv(64)
                outputs += self.in_time(lambda: list(stream), "a stream beside what is no message")
            self._check_stream((1, 2, 3), params, outputs)
            self.check(*REQUESTS[0], self.in_time(lambda: client.generate(*REQUESTS[0]), "a request"))

    def test_it_listens_on_this_machine_alone(self) -> None:
        """All that listens is on loopback or in files; options that would expose it are refused, and nothing starts."""
        before = Held.now()
        with self.serving() as served, self.client(served) as client:
            self.in_time(lambda: client.generate(*REQUESTS[5]), "a request")
            for address in sorted(Held.now().beyond(before).listening):
                assert address.startswith(("127.", "::1:")), f"it listens at {address}, which other machines reach"
        exposed = self.exposed()
        if exposed is not None:
            try:
                self.build(exposed, _no_engine)
            except ConfigError as error:
                assert str(error), "options that expose it are refused without a word"
            else:
                raise AssertionError(f"{dict(exposed)} would have it listen beyond this machine, and is taken")

    # --- its own end ------------------------------------------------------------------------------------------------

    def test_a_drain_loses_nothing(self) -> None:
        """Told to end, it takes nothing new, finishes what runs, hands out the answers whole, and closes the engine."""
        params = SamplingParams(temperature=0, max_tokens=40, seed=1)
        prompts = [(number, 2, 3) for number in range(2)]
        with self.serving() as served, self.client(served) as late, ExitStack() as clients:
            self.check(*REQUESTS[5], self.in_time(lambda: late.generate(*REQUESTS[5]), "a request"))
            engine = self.engine(served)
            engine.pace_s = 0.02
            own = [clients.enter_context(self.client(served)) for _ in prompts]
            streams = [client.stream(prompt, params) for client, prompt in zip(own, prompts, strict=True)]
            begun = [self.in_time(partial(next, stream), "a first output") for stream in streams]
            engine.may_step.clear()
            engine.pace_s = 0.0
            self.drain(served.frontend)
            refused = self.asking(lambda: self._is_refused(late), "a request that came after the drain had begun")
            time.sleep(0.1)
            engine.may_step.set()
            for prompt, first, stream in zip(prompts, begun, streams, strict=True):
                rest = self.in_time(partial(_rest_of, stream), "a stream that ran when the drain began")
                self._check_stream(prompt, params, [first, *rest])
            assert refused.result(), "a request that came after the drain had begun was answered"
            served.join(self.patience_s)
            assert served.error is None, f"`serve` raised {served.error!r}"
            assert engine.closed == 1, f"the engine was closed {engine.closed} times"

    def _is_refused(self, client: FrontendClient) -> bool:
        try:
            client.generate((1, 2), SamplingParams(temperature=0, max_tokens=3, seed=1))
        except (IntarsiaError, OSError):
            return True
        return False

    def test_it_leaves_nothing_and_can_start_again(self) -> None:
        """After its end no thread, no process and no listening socket is left, and another serves at its place."""
        before = Held.now()
        with self.placed() as places:
            for _ in range(2):
                with self.serving(places=places) as served, self.client(served) as client:
                    self.check(*REQUESTS[0], self.in_time(lambda: client.generate(*REQUESTS[0]), "a request"))
                check_released(before, "`serve` has returned", self.patience_s)

    def test_an_engine_that_fails_is_told_and_ends_it(self) -> None:
        """Where a step fails for good, clients are told at once, and `serve` raises."""
        with self.serving(pace_s=0.01) as served, self.client(served) as client:
            stream = client.stream((1, 2, 3), _LONG)
            self.in_time(lambda: next(stream), "the first output")
            self.engine(served).broken = ExecutionError("the suite breaks the engine")
            try:
                self.asking(lambda: list(stream), "a stream of an engine that failed").result()
            except (IntarsiaError, OSError) as error:
                assert str(error), "the engine failed, and its client is told nothing"
            else:
                raise AssertionError("the engine failed, and the stream ends as if it had not")
            served.join(self.patience_s)
            told = str(served.error)
            assert "the suite breaks the engine" in told, f"the engine failed, and `serve` raises {served.error!r}"

    def test_an_engine_that_does_not_start_ends_it(self) -> None:
        """What `start_engine` raises `serve` raises, and nothing listens any more."""
        before = Held.now()
        with self.serving(failure=CheckpointError("the suite's file is cut short")) as served:
            served.join(self.patience_s)
            error = served.error
            assert isinstance(error, CheckpointError), f"its model cannot be read, and `serve` raises {error!r}"
            check_released(before, "an engine that did not start", self.patience_s)


def _all_of(client: FrontendClient, prompt: Sequence[int], params: SamplingParams) -> list[Output]:
    """Return all outputs of a stream."""
    with closing(client.stream(prompt, params)) as stream:
        return list(stream)


def _rest_of(stream: OutputStream) -> list[Output]:
    return list(stream)


def _connected(endpoint: tuple[str, int] | Path) -> socket.socket:
    if isinstance(endpoint, Path):
        made = socket.socket(socket.AF_UNIX)
        made.settimeout(1.0)
        made.connect(str(endpoint))
        return made
    return socket.create_connection(endpoint, timeout=1.0)


def _no_engine() -> Any:
    raise AssertionError("options that cannot be are refused before an engine starts")
