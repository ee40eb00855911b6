"""Broken frontends, around the ZeroMQ one: most are broken in how they drive their engine."""

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

from attrs import evolve

from contracts.planted import offering, planting
from intarsia.errors import IntarsiaError, InvalidRequestError
from intarsia_zmq import provide_frontends
from intarsia_zmq.contract import ZmqContract
from intarsia_zmq.control_client import ask_control
from intarsia_zmq.frontend import build
from intarsia_zmq.options import Limits
from intarsia_zmq.server import Server

FAULTS = []
plant = planting(FAULTS)


class Driven:
    """Passes an engine's calls on; a base of those that do it badly."""

    def __init__(self, engine):
        self.engine = engine

    def __getattr__(self, name):
        return getattr(self.engine, name)


class Broken:
    """A base of broken frontends. `Engine` stands between the good one and the engine; `options` go over its own."""

    Engine = Driven
    options: ClassVar = {}
    shutdown: ClassVar = {}

    def __init__(self, context):
        start = context.start_engine
        changed = evolve(context.options, **self.options)
        self.inner = build(evolve(context, options=changed, start_engine=lambda: self.Engine(start())))
        self.places = self.inner.places

    def serve(self):
        self.inner.serve()


def contract(part):
    """Return the contract for a broken frontend."""

    class Contract(ZmqContract):
        patience_s = 1.0

        def provider(self):
            return offering(provide_frontends()[0], part)

        def drain(self, frontend):
            ask_control(frontend.places.control.text, "shutdown", part.shutdown, timeout_s=self.patience_s)

    return Contract


# --- answers ----------------------------------------------------------------------------------------------------------


@plant("test_it_answers_as_the_engine_does")
class DropsSeeds(Broken):
    """It hands requests on without their seeds."""

    class Engine(Driven):
        def add(self, request):
            return self.engine.add(evolve(request, params=evolve(request.params, seed=None)))


@plant("test_it_answers_as_the_engine_does")
class AnswersOneChoice(Broken):
    """Of several choices it hands out the first for all."""

    class Engine(Driven):
        def step(self):
            outputs = self.engine.step()
            first = {o.request_id: o for o in reversed(outputs) if o.choice == 0}
            return [evolve(first.get(o.request_id, o), choice=o.choice) for o in outputs]


@plant("test_a_stream_is_the_whole_answer")
class LosesDeltas(Broken):
    """It loses every fifth output that is not a last one."""

    class Engine(Driven):
        count = 0

        def step(self):
            kept = []
            for output in self.engine.step():
                self.count += output.finish_reason is None
                if output.finish_reason is not None or self.count % 5:
                    kept.append(output)
            return kept


@plant("test_clients_get_their_own_answers")
class MixesClientsUp(Broken):
    """Where two requests say something in one step, their tokens change places."""

    class Engine(Driven):
        def step(self):
            outputs = list(self.engine.step())
            if len({output.request_id for output in outputs}) > 1:
                first, last = outputs[0], outputs[-1]
                outputs[0] = evolve(first, token_ids=last.token_ids)
                outputs[-1] = evolve(last, token_ids=first.token_ids)
            return outputs


@plant("test_a_slow_reader_holds_up_nobody")
class GivesUpOnSlowReaders(Broken):
    """It ends a stream whose reader looks away for a moment."""

    options: ClassVar = {"stall_timeout_s": 0.05, "credit": 4}


@plant("test_one_thread_drives_the_engine")
class StepsElsewhere(Broken):
    """It steps in one thread and adds in another."""

    class Engine(Driven):
        def step(self):
            with ThreadPoolExecutor(1) as other:
                return other.submit(self.engine.step).result()


# --- ends of requests -------------------------------------------------------------------------------------------------


@plant("test_closing_a_stream_cancels_its_request")
class NeverCancels(Broken):
    """It lets requests run on that nobody reads any more."""

    class Engine(Driven):
        def cancel(self, request_id):
            pass


@plant("test_closing_a_stream_cancels_its_request")
class CancelsEverybody(Broken):
    """Where one request is cancelled it cancels another, too, once there is one."""

    class Engine(Driven):
        cancelled = False

        def cancel(self, request_id):
            self.cancelled = True
            self.engine.cancel(request_id)

        def add(self, request):
            name = self.engine.add(request)
            if self.cancelled:
                self.engine.cancel(name)
            return name


@plant("test_a_client_that_vanishes_frees_its_request")
class WaitsForTheVanished(Broken):
    """It waits a minute for a client that is gone."""

    options: ClassVar = {"grace_s": 60.0}


@plant("test_a_request_that_fails_is_told_and_takes_nobody_with_it")
class TellsNoErrors(Broken):
    """A request that fails ends as if it had been long enough."""

    class Engine(Driven):
        def step(self):
            return [
                evolve(o, finish_reason="length", error=None) if o.finish_reason == "error" else o
                for o in self.engine.step()
            ]


@plant("test_a_request_that_fails_is_told_and_takes_nobody_with_it")
class SpreadsErrors(Broken):
    """Where a request fails all fail that said something in that step."""

    class Engine(Driven):
        def step(self):
            outputs = list(self.engine.step())
            failed = next((output for output in outputs if output.finish_reason == "error"), None)
            if failed is None:
                return outputs
            for output in outputs:
                if output.finish_reason is None:
                    self.engine.cancel(output.request_id)
            return [evolve(failed, request_id=output.request_id, choice=output.choice) for output in outputs]


# --- what is refused --------------------------------------------------------------------------------------------------


@plant("test_what_cannot_be_run_is_refused_by_name")
class MendsPrompts(Broken):
    """It has ids that no token has stand for others."""

    class Engine(Driven):
        def add(self, request):
            return self.engine.add(evolve(request, prompt=[token % 64 for token in request.prompt]))


@plant("test_what_cannot_be_run_is_refused_by_name")
class ForgetsWhy(Broken):
    """What the engine refuses it calls a fault of its own."""

    class Engine(Driven):
        def add(self, request):
            try:
                return self.engine.add(request)
            except InvalidRequestError as error:
                raise RuntimeError("no") from error


@plant("test_a_full_queue_says_so")
class TakesEverything(Broken):
    """It takes as many requests as there are."""

    options: ClassVar = {"limits": Limits()}


@plant("test_bytes_that_are_no_message_harm_nobody")
class EndsByGarbage(Broken):
    """It ends where a handshake fails."""

    def serve(self):
        inner = self.inner
        Fragile.open(inner.options, inner.places, inner.model, inner.start_engine).serve()


class Fragile(Server):
    def _look_at_clock(self):
        super()._look_at_clock()
        if self._dispatch.counts["failed_handshakes"]:
            raise ConnectionError("a handshake failed")


@plant("test_it_listens_on_this_machine_alone")
class ListensEverywhere(Broken):
    """It listens at all addresses of the machine."""

    def __init__(self, context):
        everywhere = context.options.bind.replace("127.0.0.1", "0.0.0.0")
        super().__init__(evolve(context, options=evolve(context.options, bind=everywhere, insecure=True)))
        self.places = build(context).places


# --- its own end ------------------------------------------------------------------------------------------------------


@plant("test_a_drain_loses_nothing")
class StopsAtOnce(Broken):
    """Told to finish what runs, it stops at once."""

    shutdown: ClassVar = {"now": True}


@plant("test_a_drain_loses_nothing")
class ClosesTwice(Broken):
    """It closes its engine twice."""

    class Engine(Driven):
        def close(self):
            self.engine.close()
            self.engine.close()


@plant("test_it_leaves_nothing_and_can_start_again")
class LeavesAThread(Broken):
    """A thread of it goes on after its end."""

    def serve(self):
        threading.Thread(target=threading.Event().wait, args=(4.0,), daemon=True).start()
        super().serve()


@plant("test_an_engine_that_fails_is_told_and_ends_it")
class IgnoresFailures(Broken):
    """It goes on stepping an engine that fails."""

    class Engine(Driven):
        def step(self):
            try:
                return self.engine.step()
            except IntarsiaError:
                return []


@plant("test_an_engine_that_does_not_start_ends_it")
class HidesAFailedStart(Broken):
    """Where its engine does not start it ends without a word."""

    def serve(self):
        with contextlib.suppress(IntarsiaError):
            super().serve()
