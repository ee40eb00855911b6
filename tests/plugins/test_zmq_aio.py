"""The asyncio client: as the threaded one, with tasks."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest

from intarsia.errors import ConfigError, InvalidRequestError
from intarsia.types import SamplingParams
from intarsia_zmq.aio import AsyncClient
from intarsia_zmq.calls import ConnectionLostError
from intarsia_zmq.limits import SessionLimits
from proxy import Proxy
from wire_server import MODEL, WireServer, idle

IDLE = {"running": 0, "in flight": 0, "bytes": 0}


@pytest.fixture
def server():
    with WireServer() as one:
        yield one


def run(coroutine, seconds=30):
    return asyncio.run(asyncio.wait_for(coroutine, seconds))


async def wait_for(check, seconds=5.0):
    until = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < until, "it did not come to pass"
        await asyncio.sleep(0.005)


async def collected(stream):
    return [i async for output in stream for i in output.token_ids]


def test_questions_have_their_answers(server):
    async def main():
        async with AsyncClient(server.address, timeout_s=10) as client:
            assert await client.tokenize("abc") == [97, 98, 99] and await client.detokenize([104, 105]) == "hi"
            assert await client.models() == [MODEL] and await client.explain() == {"slots": {}}
            assert (await client.stats())["server"] == {"sessions": 1} and (await client.ping()).state == "ready"

    run(main())


def test_prompts_are_answered_as_the_threaded_client_answers_them(server):
    async def main():
        async with AsyncClient(server.address, timeout_s=10) as client:
            one = await client.generate([5, 3])
            assert (one.text, one.token_ids, one.seed, one.prompt_token_ids) == ("<5><6><7>", (5, 6, 7), 7, (5, 3))
            many = await client.generate([[i, 3] for i in range(30)], SamplingParams(n=2))
            assert [c.choices[1].token_ids for c in many] == [(i, i + 1, i + 2) for i in range(30)]
            outputs = [output async for output in client.stream([5, 4])]
            assert [i for o in outputs for i in o.token_ids] == [5, 6, 7, 8]
            assert outputs[-1].finish_reason == "length" and outputs[-1].usage.prompt_tokens == 2

    run(main())


def test_many_tasks_share_one_session(server):
    async def main():
        async with AsyncClient(server.address, timeout_s=10) as client:
            got = await asyncio.gather(*(collected(client.stream([n * 100, 50])) for n in range(64)))
            assert got == [list(range(n * 100, n * 100 + 50)) for n in range(64)]
            assert (await client.stats())["server"] == {"sessions": 1}
            assert client._inboxes == {}

    run(main())


def test_a_cancelled_task_and_a_loop_that_is_left_cancel_their_requests(server):
    async def main():
        async with AsyncClient(server.address, timeout_s=10) as client:
            tasks = [
                asyncio.create_task(client.generate([5, 0])),
                asyncio.create_task(collected(client.stream([5, 0]))),
                asyncio.create_task(client.generate([[5, 0], [6, 0]])),
            ]
            await wait_for(lambda: server.do(lambda: len(server.double.running)) == 4)
            for task in tasks:
                task.cancel()
            for task in tasks:
                with pytest.raises(asyncio.CancelledError):
                    await task
            async for output in client.stream([5, 0]):
                if output.token_ids[0] > 10:
                    break
            async with client.stream([5, 0]) as stream:
                await anext(stream)
            async with contextlib.aclosing(client.stream([5, 0])) as stream:
                await anext(stream)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(client.generate([5, 0]), 0.05)
            await wait_for(lambda: server.do(lambda: idle(server.double)) == IDLE)
            assert client._inboxes == {} and client._link.connection.is_idle

    run(main())


def test_one_prompt_of_a_list_that_is_refused_cancels_the_others(server):
    async def main():
        async with AsyncClient(server.address, timeout_s=10) as client:
            with pytest.raises(InvalidRequestError, match=r"sampling\.max_tokens"):
                await client.generate([[1, 0], [2, 5]], [SamplingParams(), SamplingParams(max_tokens=1 << 25)])
            await wait_for(lambda: server.do(lambda: idle(server.double)) == IDLE)

    run(main())


def test_a_loop_that_is_busy_loses_nothing_and_keeps_its_session():
    async def main(server):
        async with AsyncClient(server.address, timeout_s=10, credit=8) as client:
            stream = client.stream([0, 300])
            first = await anext(stream)
            time.sleep(1.0)  # three heartbeats are 0.6 s
            assert server.do(lambda: [s.gone_at for s in server.double.sessions._by_token.values()]) == [None]
            assert list(first.token_ids) + await collected(stream) == list(range(300))

    with WireServer(limits=SessionLimits(heartbeat_s=0.2, grace_s=0.2)) as server:
        run(main(server))


def test_a_connection_that_is_cut_loses_and_doubles_nothing():
    async def main(server, proxy):
        async with AsyncClient(proxy.address, timeout_s=20, credit=16) as client:
            tasks = [asyncio.create_task(collected(client.stream([n * 1000, 300]))) for n in range(8)]
            for _ in range(2):
                await wait_for(lambda: server.do(lambda: len(server.double.running)) == 8)
                await asyncio.sleep(0.1)
                proxy.cut()
            assert await asyncio.gather(*tasks) == [list(range(n * 1000, n * 1000 + 300)) for n in range(8)]
            assert proxy.connections >= 2

    with WireServer(pace_s=0.002) as server, Proxy(server.address) as proxy:
        run(main(server, proxy))


def test_closing_ends_what_waits(server):
    async def main():
        client = AsyncClient(server.address, timeout_s=10)
        task = asyncio.create_task(client.generate([5, 0]))
        await wait_for(lambda: server.do(lambda: len(server.double.running)) == 1)
        await client.close()
        await client.close()
        with pytest.raises(ConnectionLostError, match="closed"):
            await task
        with pytest.raises(ConnectionLostError, match="closed"):
            await client.ping()
        await wait_for(lambda: server.do(lambda: len(server.double.sessions)) == 0)

    run(main())


def test_a_server_that_is_not_there_is_named_after_the_time_limit():
    async def main():
        async with AsyncClient("tcp://127.0.0.1:9", timeout_s=0.3) as client:
            with pytest.raises(ConnectionLostError, match=r"within 0\.3 s"):
                await client.generate([1, 2])

    run(main())
    with pytest.raises(RuntimeError):
        AsyncClient()

    async def wrong():
        AsyncClient("nowhere")

    with pytest.raises(ConfigError, match="address"):
        run(wrong())
