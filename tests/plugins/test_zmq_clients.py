"""Both clients against the server itself: nothing lost, doubled or left behind whatever happens between them."""

from __future__ import annotations

import asyncio
import random
import threading
import time

import pytest
import zmq

from intarsia.errors import ExecutionError, InvalidRequestError, OverloadedError
from intarsia.types import SamplingParams
from intarsia_zmq import AsyncClient, Client
from intarsia_zmq.calls import ConnectionLostError
from intarsia_zmq.control_client import ask_control
from intarsia_zmq.errors import DrainingError, SlowReaderError
from intarsia_zmq.keys import write_keys
from intarsia_zmq.options import Limits
from proxy import Proxy
from serving import FakeEngine, eventually, serving

TCP = {"bind": "tcp://127.0.0.1:*"}


def params(count, **more):
    return SamplingParams(max_tokens=count, **more)


def ids(outputs):
    return [i for output in outputs for i in output.token_ids]


def idle(running, sessions=None):
    figures = running.control("status").body
    held = figures["in_flight"] == figures["waiting"] == figures["kept_bytes"] == 0 and not running.engine.has_work
    return held and (sessions is None or figures["sessions"] == sessions)


def test_answers_streams_choices_and_questions(tmp_path):
    with serving(tmp_path) as running, Client(running.address, timeout_s=10) as client:
        assert client.generate("x", params(5)).token_ids == (0, 1, 2, 3, 4)
        made = client.generate(["x"] * 20, [params(n + 1, n=2) for n in range(20)])
        assert [c.choices[1].token_ids for c in made] == [tuple(range(n + 1)) for n in range(20)]
        assert ids(client.stream("x", params(300))) == list(range(300))
        assert client.tokenize("ab") == [97, 98] and client.detokenize([97, 98]) == "ab"
        assert client.models()[0]["family"] == "fake" and client.explain()["hash"] == "abc"
        assert client.stats()["server"]["sessions"] == 1 and client.ping().state == "ready"
        eventually(lambda: idle(running, 1))
    with serving(tmp_path) as running:
        with Client(running.address, timeout_s=10) as client:
            client.ping()
        eventually(lambda: idle(running, 0))


def test_what_is_wrong_has_its_type_in_streams_answers_and_questions(tmp_path):
    with serving(tmp_path) as running, Client(running.address, timeout_s=10) as client:
        for prompt in ("refuse me", ["x", "refuse me"]):
            with pytest.raises(InvalidRequestError, match="refused") as caught:
                client.generate(prompt, params(10**6))
            assert caught.value.field == "prompt"
        with pytest.raises(InvalidRequestError, match="refused"):
            next(client.stream("refuse me"))
        with pytest.raises(InvalidRequestError, match="no template"):
            client.tokenize([{"role": "user", "content": "x"}])
        with pytest.raises(InvalidRequestError, match="deadline_s"):
            client.generate("x", params(1), deadline_s=-1)
        assert client.generate("fail midway", params(9)).finish_reason == "error"
        assert client.generate("x", params(10**6), deadline_s=0.1).finish_reason == "deadline"
        eventually(lambda: idle(running))


def test_a_full_server_says_so(tmp_path):
    engine = FakeEngine(max_running=1)
    engine.may_step.clear()
    with serving(tmp_path, engine, limits=Limits(requests=3)) as running:
        with Client(running.address, timeout_s=10) as client, pytest.raises(OverloadedError) as caught:
            client.generate(["x"] * 8, params(2))
        assert caught.value.retry_after_s > 0
        engine.may_step.set()
        eventually(lambda: idle(running))


def test_leaving_a_loop_frees_the_engine(tmp_path):
    with serving(tmp_path) as running, Client(running.address, timeout_s=10) as client:
        for output in client.stream("x", params(10**6)):
            if output.token_ids[-1] > 50:
                break
        eventually(lambda: idle(running))


def test_heartbeats_go_on_during_a_step_that_is_longer_than_three(tmp_path):
    with (
        serving(tmp_path, FakeEngine(step_s=0.8), heartbeat_s=0.2, grace_s=0.1) as running,
        Client(running.address, timeout_s=10) as client,
    ):
        stream = client.stream("x", params(2))
        seen = []
        while len(seen) < 3:
            pong = client.ping()
            if pong.step_age_s is not None:
                assert pong.round_trip_s < 0.4
                seen.append(pong.step_age_s)
            time.sleep(0.2)
        assert max(seen) > 0.3 and ids(stream) == [0, 1]
        assert client.stats()["server"]["sessions"] == 1


def test_a_cut_is_not_seen_by_who_reads(tmp_path):
    engine = FakeEngine(step_s=0.002)
    with (
        serving(tmp_path, engine, grace_s=10.0, **TCP) as running,
        Proxy(running.address) as proxy,
        Client(proxy.address, timeout_s=20, credit=16) as client,
    ):
        streams, cuts, got = [client.stream("x", params(400, n=2)) for _ in range(3)], [20, 120, 250], []
        for output in streams[0]:
            got.append(output)
            if cuts and output.token_ids[-1] >= cuts[0]:
                cuts.pop(0)
                proxy.cut()
        for outputs in (got, list(streams[1]), list(streams[2])):
            for choice in range(2):
                assert ids(o for o in outputs if o.choice == choice) == list(range(400))
        assert proxy.connections == 4
        eventually(lambda: idle(running, 1))


def test_cuts_at_any_byte_lose_and_double_nothing(tmp_path):
    rng = random.Random(7)
    with (
        serving(tmp_path, FakeEngine(step_s=0.001), grace_s=10.0, **TCP) as running,
        Proxy(running.address) as proxy,
        Client(proxy.address, timeout_s=20, credit=32) as client,
    ):
        for _ in range(12):
            proxy.bytes_left = rng.randrange(1, 4000)
            streams = [client.stream("x", params(60)) for _ in range(3)]
            assert [ids(stream) for stream in streams] == [list(range(60))] * 3
        assert proxy.connections >= 6
        eventually(lambda: idle(running, 1))


def test_a_reader_that_stops_ends_with_a_reason_and_neighbours_do_not_feel_it(tmp_path):
    with (
        serving(tmp_path, FakeEngine(step_s=0.001), stall_timeout_s=0.3) as running,
        Client(running.address, timeout_s=10, credit=4) as client,
    ):
        slow = client.stream("x", params(10**6))
        got = [next(slow)]
        assert ids(client.stream("x", params(200))) == list(range(200))
        eventually(lambda: running.engine.num_running == 0)
        with pytest.raises(SlowReaderError):
            for output in slow:
                got.append(output)
        assert ids(got) == list(range(len(ids(got))))
        eventually(lambda: idle(running))


def test_an_engine_that_fails_ends_what_runs_with_what_happened(tmp_path):
    engine = FakeEngine(step_s=0.005)
    with serving(tmp_path, engine) as running, Client(running.address, timeout_s=1) as client:
        streams = [client.stream("x", params(10**6)) for _ in range(4)]
        for stream in streams:
            next(stream)
        engine.broken = RuntimeError("no more memory")
        for stream in streams:
            with pytest.raises(ExecutionError):
                list(stream)
        assert running.join() is not None


def test_a_server_that_drains_finishes_what_runs_and_takes_nothing_new(tmp_path):
    engine = FakeEngine(step_s=0.005)
    with serving(tmp_path, engine) as running, Client(running.address, timeout_s=5) as client:
        stream = client.stream("x", params(60))
        first = next(stream)
        running.control("drain")
        with pytest.raises(DrainingError):
            client.generate("x", params(3))
        assert client.ping().state == "draining"
        assert ids([first, *stream]) == list(range(60))
        running.control("resume")
        assert client.generate("x", params(3)).token_ids == (0, 1, 2)


def test_a_server_that_is_started_anew_is_found_again(tmp_path):
    with serving(tmp_path, FakeEngine(step_s=0.005)) as running, Client(running.address, timeout_s=10) as client:
        begun = client.stream("x", params(10**6))
        next(begun)
        running.control("shutdown", now=True)
        running.join()
        with serving(tmp_path):
            try:
                last = list(begun)[-1]
            except (ConnectionLostError, ExecutionError, DrainingError):
                pass  # the connection ended first
            else:
                assert last.finish_reason == "abort"  # the server's last word came
            assert client.generate("x", params(3)).token_ids == (0, 1, 2)


def test_200_clients_come_and_go_at_random_and_nothing_is_left(tmp_path):
    rng = random.Random(3)
    with serving(tmp_path, FakeEngine(step_s=0.001), heartbeat_s=1.0, grace_s=0.3, **TCP) as running:
        control, stop = [], threading.Event()

        def run_control():
            with Client(running.address, timeout_s=10) as client:
                while not stop.is_set():
                    control.append(ids(client.stream("x", params(100))))

        def come_and_go(seed):
            own = random.Random(seed)
            with Client(running.address, timeout_s=10) as client:
                for _ in range(own.randrange(1, 3)):
                    stream = client.stream("x", params(own.choice((5, 10**6)), n=own.choice((1, 4))))
                    for _ in range(own.randrange(4)):
                        next(stream, None)
                    if own.random() < 0.5:
                        stream.close()

        neighbour = threading.Thread(target=run_control)
        neighbour.start()
        for _ in range(20):
            threads = [threading.Thread(target=come_and_go, args=(rng.random(),)) for _ in range(10)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(20)
                assert not thread.is_alive()
        stop.set()
        neighbour.join(20)
        assert control and all(each == list(range(100)) for each in control)
        eventually(lambda: idle(running, 0))


def test_the_asyncio_client_does_the_same(tmp_path):
    async def main(running, proxy):
        async with AsyncClient(proxy.address, timeout_s=20, credit=16) as client:

            async def read():
                return [i async for output in client.stream("x", params(200)) for i in output.token_ids]

            tasks = [asyncio.create_task(read()) for _ in range(16)]
            await asyncio.sleep(0.2)
            proxy.cut()
            assert await asyncio.gather(*tasks) == [list(range(200))] * 16
            made = await client.generate(["x"] * 4, params(3))
            assert [c.token_ids for c in made] == [(0, 1, 2)] * 4
            forever = asyncio.create_task(client.generate("x", params(10**6)))
            await asyncio.sleep(0.1)
            forever.cancel()
            with pytest.raises(InvalidRequestError):
                await client.generate("refuse me")
            assert (await client.ping()).state == "ready" and proxy.connections == 2

    with serving(tmp_path, FakeEngine(step_s=0.002), grace_s=10.0, **TCP) as running, Proxy(running.address) as proxy:
        asyncio.run(asyncio.wait_for(main(running, proxy), 30))
        eventually(lambda: idle(running, 0))


def test_where_nothing_can_be_sent_no_client_waits_in_sending(monkeypatch):
    """As after a refusal: libzmq has no connection that it could send to, and a plain send waits for ever."""
    monkeypatch.setattr(zmq.Socket, "connect", lambda self, address: None)
    begun = time.monotonic()
    with pytest.raises(ConnectionLostError, match=r"no answer within 0\.3 s"):
        ask_control("ipc:///nowhere", "status", timeout_s=0.3)
    with Client("tcp://127.0.0.1:9", timeout_s=0.3) as client:
        for call in (client.ping, lambda: client.generate("x"), lambda: next(client.stream("x"))):
            with pytest.raises(ConnectionLostError):
                call()

    async def main():
        async with AsyncClient("tcp://127.0.0.1:9", timeout_s=0.3) as client:
            with pytest.raises(ConnectionLostError):
                await client.generate("x")

    asyncio.run(main())
    assert time.monotonic() - begun < 8


def test_with_keys_friends_are_let_in_strangers_are_not_and_one_that_is_removed_is_not_let_back(tmp_path):
    for name in ("server", "friend", "stranger"):
        write_keys(tmp_path / name, name)
    allowed = tmp_path / "allowed"
    allowed.mkdir()
    entry = allowed / "friend.key"
    entry.write_text((tmp_path / "friend" / "friend.key").read_text())
    options = {"server_key": str(tmp_path / "server" / "server.key_secret"), "client_keys": str(allowed), **TCP}
    server_key = tmp_path / "server" / "server.key"

    def client(name, timeout_s=10.0):
        key = tmp_path / name / f"{name}.key_secret"
        return Client(running.address, server_key=server_key, key=key, timeout_s=timeout_s)

    with serving(tmp_path, **options) as running, client("friend") as friend:
        assert friend.generate("x", params(3)).token_ids == (0, 1, 2)
        with client("stranger") as stranger, pytest.raises(ConnectionLostError, match="key"):
            stranger.ping()
        with Client(running.address, timeout_s=2) as plain, pytest.raises(ConnectionLostError, match="CURVE"):
            plain.ping()
        assert friend.generate("x", params(3)).token_ids == (0, 1, 2)
        entry.unlink()
        running.control("reload")
        time.sleep(0.6)
        with client("friend") as again, pytest.raises(ConnectionLostError, match="key"):
            again.ping()
