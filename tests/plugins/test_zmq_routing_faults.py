"""A router before replicas, with real sockets: nothing is lost, doubled or left behind whatever happens to them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from itertools import cycle

import msgpack
import pytest
import zmq

from intarsia.errors import ExecutionError, IntarsiaError, InvalidRequestError, OverloadedError
from intarsia.types import SamplingParams
from intarsia_zmq import AsyncClient, Client
from intarsia_zmq.calls import ConnectionLostError
from intarsia_zmq.errors import DrainingError, SlowReaderError
from intarsia_zmq.keys import write_keys
from intarsia_zmq.options import Limits
from intarsia_zmq.routing.server import ReplicaKeys, open_router
from proxy import Proxy
from routing import fleet, held, is_idle, listed, routing, states
from serving import FakeEngine, Peer, eventually, serving
from wire_server import MODEL, WireServer

#: Longer than one block, so that it has a prefix to remember.
PROMPT = "a prompt of some length. " * 40


def params(count, **more):
    return SamplingParams(max_tokens=count, **more)


def ids(outputs):
    return [token for output in outputs for token in output.token_ids]


def line(router, server):
    return listed(router)[server.address]


def busy(router):
    """Return the address of the replica that is at something."""
    return next((address for address, each in listed(router).items() if each["in_flight"]), None)


def by_address(servers, address):
    (found,) = [each for each in servers if each.address == address]
    return found


def kill(server):
    """End a server in the middle of what it is at."""
    server.engine.may_step.set()
    server.control("shutdown", now=True)
    server.join()


class Patient(FakeEngine):
    """Says its numbers slowly enough for a test to come in between."""

    def __init__(self, **options):
        super().__init__(step_s=0.005, **options)


# --- every client, unchanged ------------------------------------------------------------------------------------------


def test_answers_streams_choices_and_questions_come_through(tmp_path):
    with fleet(tmp_path, None, None) as (router, servers), Client(router.address, timeout_s=10) as client:
        assert client.generate("x", params(5)).token_ids == (0, 1, 2, 3, 4)
        made = client.generate(["x"] * 40, [params(n + 1, n=2) for n in range(40)])
        assert [c.choices[1].token_ids for c in made] == [tuple(range(n + 1)) for n in range(40)]
        assert ids(client.stream("x", params(700))) == list(range(700))
        assert client.tokenize("ab") == [97, 98] and client.detokenize([97, 98]) == "ab"
        assert client.tokenize("x" * 1000) == [120] * 1000, "ids that travel as a blob"
        assert client.models() == [
            {"name": "fake", "family": "fake", "vocab_size": 256, "max_model_len": 1 << 20, "chat": False}
        ]
        assert client.explain()["hash"] == "abc" and client.explain()["router"]["policy"] == "prefix"
        assert client.ping().state == "ready"
        stats = client.stats()
        assert stats["server"]["sessions"] == 1 and len(stats["replicas"]) == 2
        assert sum(each["sent"] for each in stats["replicas"]) == 42
        eventually(lambda: client.stats()["engine"].get("steps") == sum(each.engine.steps for each in servers))
        eventually(lambda: is_idle(router, *servers))
        assert all(each.engine.order for each in servers), "both were given something"


def test_an_asyncio_client_streams_cancels_and_asks(tmp_path):
    async def work(address):
        async with AsyncClient(address, timeout_s=10) as client:
            many = await asyncio.gather(*(client.generate("x", params(n + 1)) for n in range(20)))
            assert [len(each.token_ids) for each in many] == list(range(1, 21))
            task = asyncio.create_task(client.generate("x", params(10**6)))
            await asyncio.sleep(0.2)
            task.cancel()
            assert (await client.tokenize("ab")) == [97, 98]

    with fleet(tmp_path, None, None) as (router, servers):
        asyncio.run(work(router.address))
        eventually(lambda: is_idle(router, *servers))


def test_what_is_wrong_has_its_type_and_what_fails_says_so(tmp_path):
    with fleet(tmp_path, None, None) as (router, servers), Client(router.address, timeout_s=10) as client:
        with pytest.raises(InvalidRequestError, match="refused") as caught:
            client.generate("refuse me", params(5))
        assert caught.value.field == "prompt"
        with pytest.raises(InvalidRequestError, match="no template"):
            client.tokenize([{"role": "user", "content": "x"}])
        with pytest.raises(IntarsiaError, match="fault of the server"):
            client.generate("break add", params(5))
        made = client.generate("fail midway", params(9))
        assert made.finish_reason == "error" and made.token_ids == (0, 1, 2)
        assert client.generate("x", params(10**6), deadline_s=0.1).finish_reason == "deadline"
        eventually(lambda: is_idle(router, *servers))


def test_a_request_without_a_seed_gets_one_and_a_given_one_is_kept(tmp_path):
    class Seeded(FakeEngine):
        def add(self, request):
            self.seeds = [*getattr(self, "seeds", []), request.params.seed]
            return super().add(request)

    engine = Seeded()
    with fleet(tmp_path, engine) as (router, _), Client(router.address, timeout_s=10) as client:
        client.generate(["x", "x", "x"], [params(1), params(1), params(1, seed=0)])
    first, second, third = engine.seeds
    assert first and second and first != second and third == 0
    with routing(tmp_path, [], wait=False, route={"seeded": False}):
        pass


def test_the_control_socket_knows_what_a_servers_does(tmp_path):
    engine = Patient()
    with fleet(tmp_path, engine) as (router, _), Client(router.address, timeout_s=10) as client:
        assert router.control("status").body["state"] == "ready"
        router.control("pause")
        stream = client.stream("x", params(3))
        time.sleep(0.3)
        assert router.control("status").body["waiting"] == 1 and not engine.order
        router.control("resume")
        assert ids(stream) == [0, 1, 2]
        assert router.control("reload", options={"limits": {"requests": 7}}).body["applied"] == ["limits.requests"]
        router.control("drain")
        with pytest.raises(DrainingError):
            client.generate("x", params(1))
        router.control("resume")
        assert router.control("nothing").body["code"] == "unsupported"
        assert router.control("shutdown").kind == "status"
        router.join()


@pytest.mark.parametrize("answer", ["add_replica", "drain_replica", "remove_replica"])
def test_a_replica_that_is_none_is_refused_by_name(tmp_path, answer):
    with routing(tmp_path, [], wait=False) as router:
        for name in ("nonsense", "tcp://127.0.0.1:*", 5, None, "tcp://127.0.0.1:99999"):
            if answer != "add_replica" or name != "tcp://127.0.0.1:99999":
                error = router.control(answer, replica=name)
                assert (error.kind, error.body["code"], error.body["field"]) == ("error", "invalid", "replica")
        assert listed(router) == {}


# --- where requests go ------------------------------------------------------------------------------------------------


def order(servers):
    return [len(each.engine.order) for each in servers]


def test_equal_beginnings_go_where_they_were_and_others_where_less_is_done(tmp_path):
    with fleet(tmp_path, None, None) as (router, servers), Client(router.address, timeout_s=10) as client:
        for turn in range(6):
            client.generate(PROMPT + "more " * turn, params(2))
        assert sorted(order(servers)) == [0, 6]
        for turn in range(4):
            client.generate(f"{turn} " + PROMPT, params(2))
        assert sorted(order(servers)) != [0, 10]
        before = order(servers)
        for _ in range(3):
            client.generate(PROMPT, params(2), cache_salt="mine")
        after = order(servers)
        assert sorted(b - a for a, b in zip(before, after, strict=True)) == [0, 3]


def test_a_cached_prefix_is_left_where_its_replica_has_more_to_do(tmp_path):
    engines = [FakeEngine(), FakeEngine()]
    for engine in engines:
        engine.may_step.clear()
    tokens = len(PROMPT) // 4
    with (
        fleet(tmp_path, *engines, route={"request_tokens": tokens // 4}) as (router, servers),
        Client(router.address, timeout_s=10) as client,
    ):
        streams = [client.stream(PROMPT, params(2)) for _ in range(12)]
        eventually(lambda: sum(each["in_flight"] for each in listed(router).values()) == 12)
        # The first costs all its prompt; each after it a quarter where it is cached, so the other comes in after four.
        assert sorted(each["sent"] for each in listed(router).values())[0] >= 3
        for engine in engines:
            engine.may_step.set()
        assert [ids(stream) for stream in streams] == [[0, 1]] * 12
        eventually(lambda: is_idle(router, *servers))


def test_turns_are_taken_where_they_are_asked_for(tmp_path):
    engines = [FakeEngine() for _ in range(3)]
    with (
        fleet(tmp_path, *engines, route={"policy": "round_robin"}) as (router, servers),
        Client(router.address, timeout_s=10) as client,
    ):
        for _ in range(9):
            client.generate(PROMPT, params(1))
        assert order(servers) == [3, 3, 3]


def test_work_of_others_at_a_replica_counts_as_load(tmp_path):
    engines = [Patient(), Patient()]
    with (
        fleet(tmp_path, *engines, route={"policy": "least_loaded"}) as (router, servers),
        Client(servers[0].address, timeout_s=10) as other,
        Client(router.address, timeout_s=10) as client,
    ):
        streams = [other.stream("x", params(10**6)) for _ in range(5)]
        eventually(lambda: line(router, servers[0])["foreign"] == 5)
        for _ in range(4):
            client.generate("x", params(1))
        assert len(engines[1].order) == 4 and len(engines[0].order) == 5
        del streams


def test_a_prompt_of_a_whole_answer_weighs_no_more_once_its_replica_has_begun_with_it(tmp_path):
    with fleet(tmp_path, Patient(), None) as (router, servers), Client(router.address, timeout_s=20) as client:
        thread = threading.Thread(target=client.generate, args=(PROMPT, params(600)))
        thread.start()
        eventually(lambda: busy(router) and listed(router)[busy(router)]["queued_tokens"] == 0)
        assert held(router), "it is not at its end"
        thread.join()
        eventually(lambda: is_idle(router, *servers))


def test_clients_take_turns_where_replicas_are_full(tmp_path):
    engine = FakeEngine(max_running=1)
    engine.may_step.clear()
    with (
        fleet(tmp_path, engine, route={"requests_of_replica": 2}) as (router, _),
        Client(router.address, timeout_s=10) as greedy,
        Client(router.address, timeout_s=10) as modest,
    ):
        many = [greedy.stream("x", params(300)) for _ in range(20)]
        eventually(lambda: router.control("status").body["waiting"] == 18)
        one = modest.stream("x", params(300))
        eventually(lambda: router.control("status").body["waiting"] == 19)
        engine.may_step.set()
        assert len(ids(one)) == 300
        assert router.control("status").body["waiting"] > 10, "it did not wait for all of the other's"
        for stream in many:
            stream.close()
        eventually(lambda: not held(router))


# --- a replica dies ---------------------------------------------------------------------------------------------------


def test_streams_go_on_at_another_replica_and_no_token_comes_twice(tmp_path):
    engines = [Patient(), Patient()]
    with fleet(tmp_path, *engines) as (router, servers), Client(router.address, timeout_s=20) as client:
        streams = [client.stream(PROMPT, params(300, n=1 + i % 2)) for i in range(6)]
        firsts = [next(stream) for stream in streams]
        eventually(lambda: any(len(each.engine.running) for each in servers))
        address = max(listed(router).values(), key=lambda each: each["in_flight"])["replica"]
        time.sleep(0.2)
        kill(by_address(servers, address))
        for number, (first, stream) in enumerate(zip(firsts, streams, strict=True)):
            outputs = [first, *stream]
            for choice in range(1 + number % 2):
                assert ids(each for each in outputs if each.choice == choice) == list(range(300))
            assert outputs[-1].finish_reason == "length" and outputs[-1].usage.completion_tokens >= 300
        lost = listed(router)[address]
        assert lost["state"] == "lost" and lost["lost"] >= 3
        eventually(lambda: not held(router))


def test_whole_answers_and_requests_that_have_said_nothing_are_asked_for_again_without_any_seed(tmp_path):
    engines = [FakeEngine(), FakeEngine()]
    engines[0].may_step.clear()
    engines[1].may_step.clear()
    with (
        fleet(tmp_path, *engines, route={"seeded": False}) as (router, servers),
        Client(router.address, timeout_s=20) as client,
    ):
        made = []
        threads = [
            threading.Thread(target=lambda: made.append(client.generate("x", params(4)).token_ids)) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        stream = client.stream("x", params(4))
        eventually(lambda: sum(each["in_flight"] for each in listed(router).values()) == 5)
        engines[1].may_step.set()
        servers[0].control("shutdown", now=True)  # its engine is in the middle of a step, and said nothing
        for thread in threads:
            thread.join(10)
        assert made == [(0, 1, 2, 3)] * 4 and ids(stream) == [0, 1, 2, 3]
        eventually(lambda: not held(router))


def test_an_answer_that_had_begun_and_cannot_be_repeated_ends_with_the_name_of_its_replica(tmp_path):
    engines = [Patient(), Patient()]
    with (
        fleet(tmp_path, *engines, route={"seeded": False}) as (router, servers),
        Client(router.address, timeout_s=20) as client,
    ):
        stream = client.stream("x", params(10**6))
        next(stream)
        address = busy(router)
        kill(by_address(servers, address))
        with pytest.raises(ExecutionError, match=r"no seed to repeat it") as caught:
            list(stream)
        assert address in str(caught.value)
        assert client.generate("x", params(2)).token_ids == (0, 1)
        eventually(lambda: not held(router))


def test_an_answer_that_another_replica_gives_otherwise_ends_with_an_error_before_anything_false_is_said(tmp_path):
    class Other(Patient):
        def _output(self, request, choice, ids, end):
            return super()._output(request, choice, tuple(token + 1 for token in ids), end)

    engines = {"first": Patient(), "second": Other()}
    with fleet(tmp_path, *engines.values()) as (router, servers), Client(router.address, timeout_s=20) as client:
        stream, got = client.stream("x", params(10**6)), []
        for output in stream:
            got += output.token_ids
            if len(got) > 10:
                break_at = busy(router)
                kill(by_address(servers, break_at))
                break
        with pytest.raises(ExecutionError, match="answered otherwise") as caught:
            for output in stream:
                got += output.token_ids
        assert got == list(range(got[0], got[0] + len(got))), "nothing of the other answer"
        assert all(each.address in str(caught.value) for each in servers)
        eventually(lambda: not held(router))


def test_a_replica_whose_engine_fails_loses_its_requests_to_another(tmp_path):
    engines = [Patient(), Patient()]
    with fleet(tmp_path, *engines) as (router, servers), Client(router.address, timeout_s=20) as client:
        stream = client.stream("x", params(200))
        got = ids([next(stream)])
        by_address(servers, busy(router)).engine.broken = RuntimeError("no more")
        assert got + ids(stream) == list(range(200))
        eventually(lambda: sorted(states(router)) in (["failed", "ready"], ["lost", "ready"]))
        eventually(lambda: not held(router))


def test_a_request_that_replicas_die_of_is_not_sent_to_all_of_them(tmp_path):
    class Dying(FakeEngine):
        def step(self):
            if any(request.prompt == "poison" for request in self.waiting):
                self.broken = RuntimeError("died of it")
            return super().step()

    with (
        fleet(tmp_path, *(Dying() for _ in range(4)), route={"replays": 1}) as (router, servers),
        Client(router.address, timeout_s=20) as client,
    ):
        with pytest.raises(ExecutionError, match="sent 2 times"):
            client.generate("poison", params(5))
        assert sum(each.engine.broken is not None for each in servers) == 2
        assert client.generate("x", params(2)).token_ids == (0, 1)


@pytest.mark.slow
def test_a_replica_that_hangs_is_lost_in_bounded_time_and_used_again_when_it_returns(tmp_path):
    engines = [Patient(), Patient()]
    for number in range(2):
        (tmp_path / str(number)).mkdir()
    tcp = {"bind": "tcp://127.0.0.1:*", "heartbeat_s": 0.5, "grace_s": 5.0}
    with (
        serving(tmp_path / "0", engines[0], **tcp) as one,
        serving(tmp_path / "1", engines[1], **tcp) as two,
        Proxy(one.address) as proxy,
        routing(tmp_path, [proxy.address, two.address]) as router,
        Client(router.address, timeout_s=20) as client,
    ):
        streams = [client.stream(f"{i}", params(400)) for i in range(4)]
        got = [ids([next(stream)]) for stream in streams]
        eventually(lambda: listed(router)[proxy.address]["in_flight"])
        proxy.stopped.set()
        begun = time.monotonic()
        for each, stream in zip(got, streams, strict=True):
            each += ids(stream)
        assert got == [list(range(400))] * 4 and time.monotonic() - begun < 8
        assert listed(router)[proxy.address]["state"] == "lost"
        proxy.stopped.clear()
        eventually(lambda: listed(router)[proxy.address]["state"] == "ready")
        eventually(lambda: is_idle(router, one, two))


def test_a_connection_that_is_cut_and_made_again_loses_nothing_and_repeats_nothing(tmp_path):
    (tmp_path / "0").mkdir()
    engine = Patient()
    with (
        serving(tmp_path / "0", engine, bind="tcp://127.0.0.1:*", grace_s=5.0) as one,
        Proxy(one.address) as proxy,
        routing(tmp_path, [proxy.address]) as router,
        Client(router.address, timeout_s=20) as client,
    ):
        stream, got = client.stream("x", params(300)), []
        for output in stream:
            got += output.token_ids
            if len(got) in (20, 100, 200):
                proxy.cut()
        assert got == list(range(300)) and len(engine.order) == 1, "the replica was asked once"
        assert listed(router)[proxy.address]["lost"] == 0
        eventually(lambda: is_idle(router, one))


def test_without_any_replica_requests_are_refused_at_once_or_wait_as_long_as_the_option_says(tmp_path):
    with (
        routing(tmp_path, ["tcp://127.0.0.1:9"], wait=False, route={"wait_s": 0}) as router,
        Client(router.address, timeout_s=10) as client,
    ):
        begun = time.monotonic()
        with pytest.raises(OverloadedError, match=r"no replica can take it: tcp://127\.0\.0\.1:9 is") as caught:
            client.generate("x", params(2))
        assert time.monotonic() - begun < 2 and caught.value.retry_after_s > 0
        with pytest.raises(OverloadedError, match="no replica answers"):
            client.tokenize("x")
        assert client.ping().state == "starting" and client.stats()["engine"] == {}
    with (
        routing(tmp_path, [], wait=False, route={"wait_s": 0.5}) as router,
        Client(router.address, timeout_s=10) as client,
    ):
        begun = time.monotonic()
        with pytest.raises(OverloadedError, match="there is none"):
            client.generate("x", params(2))
        assert 0.4 < time.monotonic() - begun < 3
        eventually(lambda: not held(router))


def test_a_request_waits_for_a_replica_that_is_added_while_it_waits(tmp_path):
    (tmp_path / "0").mkdir()
    with (
        routing(tmp_path, [], wait=False, route={"wait_s": 20}) as router,
        Client(router.address, timeout_s=20) as client,
        serving(tmp_path / "0") as one,
    ):
        stream = client.stream("x", params(3))
        time.sleep(0.2)
        assert router.control("add_replica", replica=one.address).kind == "replicas"
        assert ids(stream) == [0, 1, 2]


# --- replicas come and go ---------------------------------------------------------------------------------------------


def test_a_drained_replica_finishes_what_it_has_under_load_and_can_be_used_again(tmp_path):
    engines = [Patient(), Patient()]
    with (
        fleet(tmp_path, *engines, route={"policy": "round_robin"}) as (router, servers),
        Client(router.address, timeout_s=20) as client,
    ):
        streams = [client.stream("x", params(150)) for _ in range(6)]
        got = [ids([next(stream)]) for stream in streams]
        router.control("drain_replica", replica=servers[0].address)
        assert line(router, servers[0])["state"] == "draining"
        given = len(engines[0].order)
        assert given == 3
        more = client.generate(["x"] * 10, params(3))
        assert [each.token_ids for each in more] == [(0, 1, 2)] * 10
        for each, stream in zip(got, streams, strict=True):
            each += ids(stream)
        assert got == [list(range(150))] * 6 and len(engines[0].order) == given
        eventually(lambda: line(router, servers[0])["state"] == "drained")
        assert line(router, servers[0])["lost"] == 0
        router.control("add_replica", replica=servers[0].address)
        client.generate(["x"] * 4, params(1))
        assert len(engines[0].order) == given + 2


def test_what_a_removed_replica_was_at_goes_on_elsewhere_and_is_cancelled_there(tmp_path):
    engines = [Patient(), Patient()]
    with fleet(tmp_path, *engines) as (router, servers), Client(router.address, timeout_s=20) as client:
        stream = client.stream("x", params(200))
        got = ids([next(stream)])
        address = busy(router)
        router.control("remove_replica", replica=address)
        assert address not in listed(router)
        assert got + ids(stream) == list(range(200))
        eventually(lambda: not by_address(servers, address).engine.has_work)
        eventually(lambda: is_idle(router, *servers))


def test_a_replica_that_drains_by_itself_gets_nothing_more(tmp_path):
    with fleet(tmp_path, None, None) as (router, servers), Client(router.address, timeout_s=20) as client:
        servers[0].control("drain")
        made = client.generate(["x"] * 20, params(3))
        assert [each.token_ids for each in made] == [(0, 1, 2)] * 20
        eventually(lambda: line(router, servers[0])["state"] == "draining")
        assert not servers[0].engine.order


def test_a_replica_that_serves_something_else_is_not_used(tmp_path):
    class Larger(FakeEngine):
        def __init__(self):
            super().__init__()
            self.parts.num_ids = 512

    engines = [FakeEngine(), Larger()]
    with fleet(tmp_path, engines[0]) as (router, _), Client(router.address, timeout_s=10) as client:
        (tmp_path / "other").mkdir()
        with serving(tmp_path / "other", engines[1]) as other:
            router.control("add_replica", replica=other.address)
            eventually(lambda: line(router, other)["state"] == "misfit")
            assert "vocab_size is 512" in line(router, other)["reason"]
            client.generate([f"{i}" for i in range(8)], params(1))
            assert not engines[1].order
            router.control("remove_replica", replica=other.address)


def test_a_replica_that_begins_anew_at_its_address_is_used_again(tmp_path):
    (tmp_path / "0").mkdir()
    with (
        serving(tmp_path / "0") as one,
        routing(tmp_path, [one.address], route={"wait_s": 20}) as router,
        Client(router.address, timeout_s=20) as client,
    ):
        client.generate(PROMPT, params(2))
        assert line(router, one)["blocks"] > 0
        kill(one)
        stream = client.stream("x", params(3))
        with serving(tmp_path / "0") as again:
            assert ids(stream) == [0, 1, 2]
            eventually(lambda: line(router, again)["state"] == "ready")
            eventually(lambda: line(router, again)["blocks"] == 0)  # a new process has nothing cached


# --- full, slow and wrong ---------------------------------------------------------------------------------------------


def test_a_full_replica_is_passed_over_and_full_ones_together_say_so(tmp_path):
    engines = [FakeEngine(max_running=1), FakeEngine(max_running=1)]
    for engine in engines:
        engine.may_step.clear()
    for number in range(2):
        (tmp_path / str(number)).mkdir()
    limits = {"limits": Limits(requests=2)}
    with (
        serving(tmp_path / "0", engines[0], **limits) as one,
        serving(tmp_path / "1", engines[1], **limits) as two,
        routing(tmp_path, [one.address, two.address]) as router,
        Client(router.address, timeout_s=10) as client,
    ):
        streams = [client.stream(PROMPT, params(2)) for _ in range(4)]
        eventually(lambda: sum(len(e.order) + e.num_waiting * 0 for e in engines) >= 2)
        eventually(lambda: sum(each["in_flight"] for each in listed(router).values()) == 4)
        with pytest.raises(OverloadedError) as caught:
            client.generate("x", params(2))
        assert caught.value.retry_after_s > 0
        for engine in engines:
            engine.may_step.set()
        assert [ids(stream) for stream in streams] == [[0, 1]] * 4
        eventually(lambda: is_idle(router, one, two))


def test_a_full_router_says_so(tmp_path):
    engine = FakeEngine(max_running=1)
    engine.may_step.clear()
    with (
        fleet(tmp_path, engine, limits=Limits(requests=3)) as (router, servers),
        Client(router.address, timeout_s=10) as client,
    ):
        with pytest.raises(OverloadedError):
            client.generate(["x"] * 8, params(2))
        engine.may_step.set()
        eventually(lambda: is_idle(router, *servers))


def test_a_slow_reader_loses_its_own_stream_and_holds_up_nobody(tmp_path):
    with (
        fleet(tmp_path, None, stall_timeout_s=0.5) as (router, servers),
        Client(router.address, timeout_s=20, credit=2) as slow,
        Client(router.address, timeout_s=20) as other,
    ):
        stream = slow.stream("x", params(10**5))
        next(stream)
        assert ids(other.stream("x", params(2000))) == list(range(2000))
        time.sleep(1.0)
        with pytest.raises(SlowReaderError):
            for _ in stream:
                time.sleep(0.001)
        eventually(lambda: is_idle(router, *servers))


def test_ids_are_the_clients_own_through_the_router_too(tmp_path):
    engine = Patient()
    with fleet(tmp_path, engine, None) as (router, servers):
        with Peer(router.address, hello=True) as one, Peer(router.address, hello=True) as two:
            one.generate("same", max_tokens=60)
            one.next()
            one.generate("same", max_tokens=5)
            two.generate("same", max_tokens=7)
            two.send("cancel", "other")
            assert two.until_end("same")[1] == list(range(7))
            seen = []
            while not (seen and seen[-1].kind == "done"):
                seen.append(one.next())
            (error,) = [each for each in seen if each.kind == "error"]
            assert (error.id, error.body["code"], error.body["field"]) == ("", "invalid", "id")
            two.send("cancel", "same")
            one.send("credit", "same", received=seen[-1].seq, upto=0)
            one.generate("same", max_tokens=3)
            assert one.until_end("same")[1] == [0, 1, 2], "an id is free again after the end"
            for name in ("", "x" * 10_000, "a\nb"):
                one.generate(name, max_tokens=2)
                assert one.next().body["code"] in ("invalid", "malformed")
        eventually(lambda: is_idle(router, *servers))


@pytest.mark.slow
def test_clients_that_come_and_go_leave_nothing_behind(tmp_path):
    with fleet(tmp_path, Patient(), Patient()) as (router, servers):
        for number in range(24):
            with Peer(router.address, hello=True) as peer:
                peer.generate(max_tokens=10**5, sampling={"n": 1 + number % 4}, stream=bool(number % 3))
                if number % 2:
                    peer.next()
                if number % 5 == 0:
                    peer.send("bye")
        eventually(lambda: is_idle(router, *servers))


NONSENSE = [
    [b""],
    [b"\x45"],
    [b"GET / HTTP/1.1\r\n\r\n"],
    [msgpack.packb({"v": 1})],
    [msgpack.packb({"v": 99, "kind": "generate"})],
    [msgpack.packb([1, 2, 3])],
    [msgpack.packb({"v": 1, "kind": "generate", "id": "x", "body": {"prompt": {"blob": 3, "dtype": "<i4", "n": 9}}})],
    [b"\xdf\xff\xff\xff\xff"],
    [b"\xc6\x7f\xff\xff\xff"],
    [b"\x81" * 100_000],
    [msgpack.packb({"v": 1, "kind": "ping"}), *[b""] * 8],
    [msgpack.packb({"v": 1, "kind": "add_replica", "body": {"replica": "tcp://127.0.0.1:9"}})],
]


def test_nonsense_of_a_client_hurts_nobody_else(tmp_path):
    engine = Patient()
    with (
        fleet(tmp_path, engine) as (router, servers),
        Client(router.address, timeout_s=20) as client,
        Peer(router.address, hello=True) as known,
        Peer(router.address) as stranger,
    ):
        stream = client.stream("x", params(200))
        got = ids([next(stream)])
        for frames in NONSENSE:
            known.send_raw(*frames)
            stranger.send_raw(*frames)
        assert got + ids(stream) == list(range(200)) and len(listed(router)) == 1
        eventually(lambda: is_idle(router, *servers))


class Evil:
    """A replica that greets as others do, and answers requests with what is no answer."""

    def __init__(self, answers):
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.linger = 0
        port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.address, self.answers, self.asked = f"tcp://127.0.0.1:{port}", answers, 0
        self.closing = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.closing.set()
        self.thread.join()
        self.socket.close()
        self.context.term()

    def _run(self):
        model = {"name": "fake", "family": "fake", "vocab_size": 256, "max_model_len": 1 << 20, "chat": False}
        bodies = {
            "hello": ("welcome", {
                "version": 1, "model": model, "limits": {}, "heartbeat_s": 5.0, "grace_s": 5.0, "credit": 64,
                "token": b"t" * 32, "resumed": False, "requests": [],
            }),
            "ping": ("pong", {"state": "ready", "step_age_s": None}),
            "models": ("models", {"models": [model]}),
            "explain": ("explained", {"hash": "abc"}),
            "stats": ("figures", {"server": {"in_flight": "many"}, "engine": {"steps": True}}),
        }  # fmt: skip
        while not self.closing.is_set():
            if not self.socket.poll(20):
                continue
            connection, *frames = self.socket.recv_multipart()
            said = msgpack.unpackb(frames[0])
            if said["kind"] == "generate":
                self.asked += 1
                for made in self.answers(said["id"]):
                    self.socket.send_multipart([connection, *made])
            elif said["kind"] in bodies:
                kind, body = bodies[said["kind"]]
                if kind == "pong":
                    body = {**body, "echo": said.get("body", {})}
                self.socket.send_multipart([connection, _packed(kind, said.get("id", ""), 0, body)])


def _packed(kind, request_id, seq, body):
    made = {"v": 1, "kind": kind, "body": body}
    return msgpack.packb(made | ({"id": request_id} if request_id else {}) | ({"seq": seq} if seq else {}))


def _delta(request_id, seq=1, **body):
    return [_packed("delta", request_id, seq, body)]


def _done(request_id, seq=1, **body):
    said = {"choices": [{"index": 0, "finish_reason": "stop"}], "usage": {}, "timings": {}, "seed": 1}
    return [_packed("done", request_id, seq, said | body)]


NO_ANSWERS = [
    lambda name: [[b"\x45"]],
    lambda name: [[b"\xdf\xff\xff\xff\xff"]],
    lambda name: [_delta(name, choice=7, token_ids=[1])],
    lambda name: [_delta(name, token_ids=[-1])],
    lambda name: [_delta(name, text=5)],
    lambda name: [_delta(name, finish_reason="whatever")],
    lambda name: [_delta(name, seq=9, token_ids=[1])],
    lambda name: [_done(name)],
    lambda name: [_done(name, choices=[])],
    lambda name: [_done(name, choices=[{"index": 0, "finish_reason": ["stop"]}])],
    lambda name: [_done(name, usage={"prompt_tokens": "x"})],
    lambda name: [_delta(name, finish_reason="abort"), _done(name, 2)],
    lambda name: [[_packed("error", name, 1, {"code": "slow_reader", "message": "x"})]],
]


def test_nonsense_of_a_replica_costs_its_requests_a_move_and_nothing_else(tmp_path):
    (tmp_path / "0").mkdir()
    left = cycle(NO_ANSWERS)
    with (
        serving(tmp_path / "0") as good,
        Evil(lambda name: next(left)(name)) as evil,
        routing(tmp_path, [good.address, evil.address], route={"policy": "round_robin", "wait_s": 20}) as router,
        Client(router.address, timeout_s=20) as client,
    ):
        until = time.monotonic() + 30
        while evil.asked < len(NO_ANSWERS):
            assert ids(client.stream("x", params(3))) == [0, 1, 2]
            assert time.monotonic() < until, f"only {evil.asked} were asked for"
        # Where a connection ends with nonsense, a request that had said nothing is sent again on the next.
        assert len(NO_ANSWERS) / 2 < listed(router)[evil.address]["lost"] <= evil.asked
        eventually(lambda: not held(router))


def test_a_link_that_comes_upon_a_fault_of_its_own_is_made_anew(tmp_path, caplog):
    with fleet(tmp_path, Patient(), None) as (router, servers), Client(router.address, timeout_s=20) as client:
        stream = client.stream("x", params(200))
        got = ids([next(stream)])
        address = busy(router)
        loop = router.server._lifecycle.loop
        (broken,) = [each for each in loop.fleet if each.name == address]
        link = broken.link
        with contextlib.suppress(ConnectionLostError):  # the thread may have ended before `post` returns
            link.post(lambda: 1 / 0)
        assert got + ids(stream) == list(range(200))
        eventually(lambda: broken.link is not link and listed(router)[address]["state"] == "ready")
        assert "the client's thread ends" in caplog.text
        eventually(lambda: is_idle(router, *servers))


# --- cancelling -------------------------------------------------------------------------------------------------------


def test_requests_are_cancelled_wherever_they_are_and_others_are_unchanged(tmp_path):
    engine = FakeEngine(max_running=1)
    engine.may_step.clear()
    with fleet(tmp_path, engine, route={"requests_of_replica": 2}) as (router, servers):
        with Peer(router.address, hello=True) as peer:
            for name in ("runs", "waits there", "waits here"):
                peer.generate(name, max_tokens=50)
            eventually(lambda: router.control("status").body["waiting"] == 1)
            peer.send("cancel", "waits here")
            _, got, end = peer.until_end("waits here")
            assert (got, end.body["choices"][0]["finish_reason"]) == ([], "abort")
            peer.send("cancel", "waits there")
            time.sleep(0.3)  # it has come to the replica, whose engine is in its step
            engine.may_step.set()
            _, got, end = peer.until_end("waits there")
            assert (got, end.body["choices"][0]["finish_reason"]) == ([], "abort")
            assert peer.until_end("runs")[1] == list(range(50))
            for name in ("runs", "never was", "runs"):
                peer.send("cancel", name)
            assert peer.quiet()
        eventually(lambda: is_idle(router, *servers))


def test_a_request_is_cancelled_while_it_is_repeated_and_ends_once(tmp_path):
    engines = [Patient(), Patient()]
    with fleet(tmp_path, *engines) as (router, servers), Peer(router.address, hello=True) as peer:
        peer.generate(max_tokens=10**5, credit=1024)
        got = []
        while len(got) < 100:
            got += peer.next().body["token_ids"]
        address = busy(router)
        (other,) = [each for each in servers if each.address != address]
        kill(by_address(servers, address))
        eventually(lambda: line(router, other)["in_flight"] == 1)
        peer.send("cancel", "r")
        _, more, end = peer.until_end()
        assert got + more == list(range(len(got) + len(more)))
        assert end.kind == "done" and end.body["choices"][0]["finish_reason"] == "abort"
        eventually(lambda: not held(router) and not other.engine.has_work)


def test_a_request_whose_replica_dies_after_it_was_cancelled_is_not_asked_for_again(tmp_path):
    engines = [Patient(), Patient()]
    with fleet(tmp_path, *engines) as (router, servers), Peer(router.address, hello=True) as peer:
        peer.generate(max_tokens=10**5, credit=1024)
        peer.next()
        victim = by_address(servers, busy(router))
        (other,) = [each for each in servers if each is not victim]
        victim.engine.may_step.clear()
        time.sleep(0.1)
        peer.send("cancel", "r")
        time.sleep(0.1)
        kill(victim)
        _, _, end = peer.until_end()
        assert end.body["choices"][0]["finish_reason"] == "abort" and not other.engine.order
        eventually(lambda: not held(router))


@pytest.mark.slow
def test_a_client_that_returns_after_a_cut_goes_on_where_it_was_even_where_its_replica_died_meanwhile(tmp_path):
    engines = [Patient(), Patient()]
    with fleet(tmp_path, *engines, bind="tcp://127.0.0.1:*", grace_s=10.0) as (router, servers):
        with Proxy(router.address) as proxy, Client(proxy.address, timeout_s=20) as client:
            stream = client.stream("x", params(400))
            got = ids([next(stream)])
            address = busy(router)
            proxy.cut()
            kill(by_address(servers, address))
            assert got + ids(stream) == list(range(400))
        eventually(lambda: not held(router))


# --- keys and commands ------------------------------------------------------------------------------------------------


def test_keys_are_wanted_and_shown_on_both_sides(tmp_path):
    keys = tmp_path / "keys"
    for name in ("replica", "router", "front", "alice"):
        write_keys(keys / name, name)
    (tmp_path / "0").mkdir()
    secured = {"server_key": f"{keys}/replica/replica.key_secret", "client_keys": f"{keys}/router"}
    front = {"server_key": f"{keys}/front/front.key_secret", "client_keys": f"{keys}/alice"}
    tcp = {"bind": "tcp://127.0.0.1:*"}
    with serving(tmp_path / "0", **secured, **tcp) as one:
        shown = ReplicaKeys(server_key=f"{keys}/replica/replica.key", key=f"{keys}/router/router.key_secret")
        with routing(tmp_path, [one.address], keys=shown, **front, **tcp) as router:
            mine = {"server_key": f"{keys}/front/front.key", "key": f"{keys}/alice/alice.key_secret"}
            with Client(router.address, timeout_s=10, **mine) as client:
                assert client.generate("x", params(3)).token_ids == (0, 1, 2)
            with Client(router.address, timeout_s=1) as stranger, pytest.raises(IntarsiaError):
                stranger.generate("x", params(3))
        with routing(tmp_path, [one.address], wait=False) as unknown:
            eventually(lambda: states(unknown) == ["lost"])


def test_the_command_names_what_is_wrong_before_it_listens(tmp_path, capsys):
    from intarsia.cli import run

    for args, said in [
        (["--replica", "nonsense"], "replica: 'nonsense' is not tcp://host:port"),
        (["--replica", "tcp://h:1", "--replica", "tcp://h:1"], "given twice"),
        (["--endpoint", "tcp://0.0.0.0:5555"], "keygen"),
        (["--policy", "best"], "route.policy: 'best'"),
        (["-o", "route.wait=5"], "wait_s"),
        (["-o", "route.wait_s=soon"], "route.wait_s: 'soon'"),
        (["-o", "route.wait_s=-1"], "wait_s"),
        (["-o", "limits.requests=0"], "requests"),
        (["-o", "limits=5"], "limits"),
    ]:
        assert run(["route", *args]) == 2, args
        assert said in capsys.readouterr().err


def test_the_command_lists_adds_drains_and_removes(tmp_path, capsys):
    from intarsia.cli import run

    def told(*args):
        assert run(["route", *args, "--control", f"ipc://{tmp_path}/front.control"]) == 0
        return json.loads(capsys.readouterr().out)["replicas"]

    with fleet(tmp_path, None) as (_, servers):
        address = servers[0].address
        assert [each["replica"] for each in told("list")] == [address]
        assert told("drain", address)[0]["state"] == "drained"
        assert told("add", address)[0]["state"] == "ready"
        assert told("remove", address) == []
        assert run(["route", "drain", address, "--control", f"ipc://{tmp_path}/front.control"]) != 0
        assert "one of the replicas: none" in capsys.readouterr().err


def test_a_scripted_replica_serves_as_any_other(tmp_path):
    with (
        WireServer() as scripted,
        routing(tmp_path, [scripted.address], wait=False) as router,
        Client(router.address, timeout_s=10) as client,
    ):
        eventually(lambda: states(router) == ["ready"] and client.ping().state == "ready")
        assert client.models()[0] | {"name": MODEL["name"]} == MODEL
        assert "".join(output.text for output in client.stream([4, 3], params(9))) == "<4><5><6>"
        assert client.generate([4, 3], params(9)).text == "<4><5><6>"


def test_a_router_opens_no_port_that_it_was_not_told_of(tmp_path):
    from intarsia_zmq.options import ZmqOptions

    server = open_router(ZmqOptions(bind=f"ipc://{tmp_path}/front", control=""), [])
    assert list(server.addresses) == ["data"]
    server._sockets.close()


def test_a_router_says_where_to_swap_and_its_replicas_swap_by_themselves(tmp_path):
    with fleet(tmp_path, None) as (router, (server,)):
        eventually(lambda: router.control("ping").body["state"] == "ready")
        refused = router.control("swap", slot="scheduler", use="static").body
        assert refused["code"] == "unsupported" and "each replica" in refused["message"]
        assert server.control("swap", slot="scheduler", use="static").body["after"] == "static"
