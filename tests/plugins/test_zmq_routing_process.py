"""A router before real server processes with real engines: killed, stopped and drained while they answer."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from engines import engine_of
from intarsia import SamplingParams
from intarsia_zmq import Client
from intarsia_zmq.errors import SlowReaderError
from routing import fleet, held, listed, routing
from server_process import left_behind, process, ready, tiny_model
from serving import FakeEngine, Peer, eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PROMPT = [5, 6, 7] * 20
#: Sampled: an answer that repeated itself would hide what is lost or doubled.
LONG = SamplingParams(max_tokens=1500, temperature=1.0, seed=11, ignore_eos=True, logprobs=1)
#: No seed, so that the router gives it one.
FREE = SamplingParams(max_tokens=600, temperature=1.0, ignore_eos=True)
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(model):
    with engine_of(model) as engine:
        (made,) = engine.generate([PROMPT], LONG)
    return made


@contextmanager
def engines(tmp_path, model, count=2, **options):
    """A router before so many servers in processes; yield (router, the processes)."""
    with ExitStack() as stack:
        running = []
        for number in range(count):
            (tmp_path / str(number)).mkdir()
            frontend = ("-o", "frontend=zmq", "-o", "frontend.heartbeat_s=1")
            running.append(stack.enter_context(process(tmp_path / str(number), model, *frontend)))
        for each in running:
            with Peer(each.address, hello=True) as peer:
                ready(peer)
                peer.send("bye")
        router = stack.enter_context(routing(tmp_path, [each.address for each in running], **options))
        yield router, running


def read(streams, after=()):
    """Read streams in turn, doing something after so many outputs; return the outputs of each."""
    todo, got = dict(after), [[] for _ in streams]
    count, open_streams = 0, dict(enumerate(streams))
    while open_streams:
        for number, stream in list(open_streams.items()):
            output = next(stream, None)
            if output is None:
                del open_streams[number]
                continue
            got[number].append(output)
            count += 1
            if count in todo:
                todo.pop(count)()
    return got


def tokens(outputs):
    return tuple(token for output in outputs for token in output.token_ids)


def test_each_killed_replica_in_turn_costs_its_streams_nothing_but_time(tmp_path, model, expected):
    with engines(tmp_path, model, 3) as (router, running), Client(router.address, timeout_s=60) as client:
        streams = [client.stream(PROMPT, LONG) for _ in range(4)] + [client.stream(PROMPT, FREE) for _ in range(4)]
        kills = {200: running[0].process.kill, 900: running[1].process.kill}
        got = read(streams, kills)
        assert [tokens(each) for each in got[:4]] == [expected.token_ids] * 4
        assert all("".join(o.text for o in each) == expected.text for each in got[:4])
        for each in got[:4]:
            logprobs = [entry for output in each for entry in output.logprobs]
            assert [entry.token_id for entry in logprobs] == list(expected.token_ids)
            assert [e.logprob for e in logprobs] == pytest.approx([e.logprob for e in expected.logprobs], abs=1e-4)
        assert [len(tokens(each)) for each in got[4:]] == [600] * 4 and len({tokens(each) for each in got[4:]}) == 4
        states = [listed(router)[each.address]["state"] for each in running]
        assert states == ["lost", "lost", "ready"]
        eventually(lambda: not held(router))
        eventually(lambda: not left_behind(running[2], sessions=1))


def test_a_stopped_replica_is_lost_in_bounded_time_and_holds_nothing_when_it_goes_on(tmp_path, model, expected):
    with engines(tmp_path, model) as (router, running), Client(router.address, timeout_s=60) as client:
        streams = [client.stream(PROMPT, LONG) for _ in range(4)]
        times = []

        def stop():
            times.append(time.monotonic())
            running[0].process.send_signal(signal.SIGSTOP)

        def lost():
            eventually(lambda: listed(router)[running[0].address]["state"] == "lost", 30)
            times.append(time.monotonic())

        watch = threading.Thread(target=lost)
        try:
            got = read(streams, {100: stop, 101: watch.start})
            watch.join()
            assert times[1] - times[0] < 4, "one second of silence, asked for four times a second"
            assert [tokens(each) for each in got] == [expected.token_ids] * 4
        finally:
            running[0].process.send_signal(signal.SIGCONT)
        eventually(lambda: listed(router)[running[0].address]["state"] == "ready", 30)
        eventually(lambda: not left_behind(running[0], sessions=1), 30)
        eventually(lambda: not held(router))


def test_answers_questions_and_cached_prefixes_are_those_of_one_engine(tmp_path, model, expected):
    with engines(tmp_path, model) as (router, running), Client(router.address, timeout_s=60) as client:
        prompt = [3, 4, 5, 6] * 200
        for _ in range(3):
            made = client.generate(prompt, SamplingParams(max_tokens=4, temperature=0))
        assert made.usage.cached_tokens >= 700, "it went where its prefix is"
        assert client.generate(PROMPT, LONG).token_ids == expected.token_ids
        assert client.models()[0]["family"] == "llama" and client.explain()["model"]["family"] == "llama"
        with Client(running[0].address) as direct:
            assert client.models() == direct.models()
            assert client.tokenize("ab") == direct.tokenize("ab")


def test_a_slow_reader_is_told_so_and_its_replica_is_free(tmp_path, model):
    with engines(tmp_path, model, 1, stall_timeout_s=1.0) as (router, running):
        with Client(router.address, timeout_s=60, credit=1) as slow:
            stream = slow.stream(PROMPT, SamplingParams(max_tokens=3900, temperature=0, ignore_eos=True))
            next(stream)
            time.sleep(4)
            with pytest.raises(SlowReaderError):
                list(stream)
        eventually(lambda: not held(router))
        eventually(lambda: not left_behind(running[0], sessions=1))


def test_the_command_serves_drains_on_sigterm_and_leaves_no_process(tmp_path, model, expected):
    (tmp_path / "0").mkdir()
    with process(tmp_path / "0", model) as one:
        code = "import sys; from intarsia.cli import main; main()"
        front = f"ipc://{tmp_path}/front"
        args = ["route", "--endpoint", front, "--replica", one.address, "-o", f"control=ipc://{tmp_path}/control"]
        router = subprocess.Popen([sys.executable, "-c", code, *args], stderr=subprocess.PIPE, text=True)
        try:
            with Client(front, timeout_s=60) as client:
                stream = client.stream(PROMPT, LONG)
                first = next(stream)
                router.send_signal(signal.SIGTERM)
                assert tokens([first, *stream]) == expected.token_ids
            assert router.wait(20) == 0, router.stderr.read()
        finally:
            router.kill()
            said = router.communicate()[1]
        assert "Traceback" not in said and "draining: 1 requests" in said
        eventually(lambda: not left_behind(one))


def test_whatever_happens_to_replicas_every_stream_is_whole_or_cancelled(tmp_path):
    rng = random.Random(5)

    class Paced(FakeEngine):
        def __init__(self):
            super().__init__(step_s=0.003)

    with fleet(tmp_path, Paced(), Paced(), Paced(), route={"wait_s": 30}) as (router, servers):
        wrong, stop = [], threading.Event()

        def work(seed):
            mine = random.Random(seed)
            with Client(router.address, timeout_s=60, credit=mine.choice((2, 16, None))) as client:
                while not stop.is_set():
                    count, got = mine.randrange(1, 200), []
                    leave = mine.randrange(count) if mine.random() < 0.3 else None
                    stream = client.stream("x" * mine.randrange(2000), SamplingParams(max_tokens=count))
                    for output in stream:
                        got += output.token_ids
                        if leave is not None and len(got) > leave:
                            stream.close()
                            break
                    if got != list(range(count if leave is None else len(got))):
                        wrong.append((count, leave, got))

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for _ in range(40):
            name = rng.choice(servers).address
            router.control(rng.choice(("add_replica", "remove_replica", "drain_replica")), replica=name)
            if not any(line["state"] in ("ready", "joining", "connecting") for line in listed(router).values()):
                router.control("add_replica", replica=name)
            time.sleep(rng.random() * 0.4)
        for server in servers:
            router.control("add_replica", replica=server.address)
        stop.set()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        assert not wrong
        eventually(lambda: not held(router) and not any(each.engine.has_work for each in servers))


@pytest.mark.skipif(
    shutil.which("node") is None or shutil.which("npm") is None, reason="NODE AND NPM ARE NOT INSTALLED"
)
def test_the_client_in_node_streams_through_a_router(tmp_path):
    folder = tmp_path / "node"
    shutil.copytree(ROOT / "examples" / "node", folder, ignore=shutil.ignore_patterns("node_modules"))
    command = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--prefer-offline"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=240, env=dict(os.environ))

    class Speaking(FakeEngine):
        def _output(self, request, choice, ids, end):
            from attrs import evolve

            return evolve(super()._output(request, choice, ids, end), text="".join(f"<{i}>" for i in ids))

    (tmp_path / "fleet").mkdir()
    with fleet(tmp_path / "fleet", Speaking(), Speaking()) as (router, servers):
        done = subprocess.run(
            ["node", "client.mjs", "--address", router.address, "--max-tokens", "9", "two", "words"],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (done.returncode, done.stdout) == (0, "".join(f"<{i}>" for i in range(9))), json.dumps(done.stderr)
        eventually(lambda: not held(router) and not any(each.engine.has_work for each in servers))
