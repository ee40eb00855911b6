"""Ranks that die, hang or fail: noticed in bounded time, said by name, and nothing left running."""

import logging
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from itertools import zip_longest
from pathlib import Path

import pytest

from intarsia import Request, SamplingParams
from intarsia.errors import ExecutionError, IntarsiaError
from intarsia_zmq import Client
from models import tiny_llama
from ranks import children, is_gone, parallel, pids, wait_until
from routing import routing
from server_process import process

LONG = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("model"), layers=5)[0]


@pytest.fixture(autouse=True)
def nothing_left():
    before = children()  # of other tests: what compiles grammars stays for the next engine
    yield
    assert {*children()} <= {*before}, "a rank was left behind"


def under_load(engine):
    """Let requests run, and return once some have said something."""
    for index in range(4):
        engine.add(Request(request_id=str(index), prompt=[index, 1, 2], params=LONG))
    said = 0
    while said < 8:
        said += sum(len(output.token_ids) for output in engine.step())


def fails(engine, timeout_s):
    """Step until the engine ends; return its error, and how long that took."""
    begun = time.monotonic()
    with pytest.raises(IntarsiaError) as caught:
        while engine.has_work:
            engine.step()
            assert time.monotonic() - begun < timeout_s, "nobody noticed"
    return str(caught.value), time.monotonic() - begun


def check_dead(engine, ranks):
    """Check that a failed engine runs nothing more, says why, and leaves no process."""
    wait_until(lambda: all(map(is_gone, ranks.values())), 10)
    with pytest.raises(ExecutionError, match="the engine can run nothing more"):
        engine.add(Request(request_id="late", prompt=[1], params=LONG))
    engine.close()
    engine.close()


@pytest.mark.parametrize(
    ("layout", "victim"),
    [
        ({"pp": 2}, 1),
        *(pytest.param({"pp": 3}, rank, marks=pytest.mark.slow) for rank in (1, 2)),
        *(pytest.param({"tp": 2, "pp": 2}, rank, marks=pytest.mark.slow) for rank in (1, 2, 3)),
    ],
)
def test_a_rank_that_is_killed_under_load_ends_the_engine_by_name(model, layout, victim):
    with parallel(model, **layout) as engine:
        ranks = pids(engine)
        under_load(engine)
        os.kill(ranks[victim], signal.SIGKILL)
        message, seconds = fails(engine, 10)
        assert f"rank {victim} (" in message and "SIGKILL" in message, message
        assert seconds < 8
        check_dead(engine, ranks)


@pytest.mark.parametrize(
    ("layout", "victim"),
    [({"pp": 2}, 1), *(pytest.param({"tp": 2, "pp": 2}, rank, marks=pytest.mark.slow) for rank in (1, 2, 3))],
)
def test_a_rank_that_hangs_under_load_ends_the_engine_by_name(model, layout, victim):
    with parallel(model, **layout, timeout_s=3.0) as engine:
        ranks = pids(engine)
        under_load(engine)
        os.kill(ranks[victim], signal.SIGSTOP)
        message, seconds = fails(engine, 20)
        assert f"rank {victim} (" in message and "it hangs" in message, message
        assert seconds < 10
        check_dead(engine, ranks)


def test_a_rank_that_dies_while_nothing_runs_is_noticed_all_the_same(model, caplog):
    caplog.set_level(logging.ERROR, "intarsia.parallel")
    with parallel(model, pp=2) as engine:
        (pid,) = pids(engine).values()
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: "rank 1 (" in caplog.text, 5)
        with pytest.raises(ExecutionError, match=r"rank 1 .* was killed by SIGKILL"):
            engine.generate([[1, 2]], LONG)


@pytest.mark.slow
def test_what_streams_ends_with_the_error_too(model):
    with parallel(model, pp=2) as engine:
        (pid,) = pids(engine).values()
        with pytest.raises(ExecutionError, match="rank 1 "):
            for index, _ in enumerate(engine.stream([1, 2, 3], LONG)):
                if index == 3:
                    os.kill(pid, signal.SIGKILL)


def test_a_rank_that_was_told_otherwise_is_found_out(model):
    """One byte of a page table is changed on its way to rank 1."""
    with parallel(model, pp=2, check_every=4) as engine:
        link = engine.parts.executor._watch.peers[1].link
        send = link.send_packed
        tampered = []

        def tamper(data):
            pages = engine.parts.cache.pages(("0", 0)) if not tampered else ()
            if pages and len(pages[0]) > 1:
                told = b"".join(page.to_bytes(4, "little") for page in pages[0])
                assert told in data
                tampered.append(engine.parts.executor._step)
                data = data.replace(told, told[:-4] + (0).to_bytes(4, "little"), 1)
            send(data)

        engine.parts.executor._watch.peers[1].link = Passing(link, tamper)
        engine.add(Request(request_id="0", prompt=list(range(20)), params=LONG))
        message, _ = fails(engine, 20)
        assert tampered
        step = 4 * -(-tampered[0] // 4)
        assert "rank 0 and rank 1 (" in message and f"diverged: after step {step} " in message, message


class Passing:
    """A link whose plans go through a function first."""

    def __init__(self, link, send):
        self._link, self.send_packed = link, send

    def __getattr__(self, name):
        return getattr(self._link, name)


# --- starting ---------------------------------------------------------------------------------------------------------


def test_a_rank_that_cannot_load_its_weights_says_so_before_the_engine_is_there(tmp_path, model):
    """The last stage's tensor is cut short on disk: rank 0 never reads it."""
    from safetensors.torch import load_file, save_file

    path, _ = tiny_llama(tmp_path, layers=5)
    file = path / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"][0, 0] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    begun = time.monotonic()
    with pytest.raises(IntarsiaError, match=r"rank 1 \(stage 1 of 2.*failed"):
        parallel(path, pp=2, sections={"quantizer": "int8"})
    assert time.monotonic() - begun < 30


def test_ranks_that_never_come_are_named_when_time_is_over(model, monkeypatch):
    """Their command does nothing."""
    monkeypatch.setattr("intarsia_parallel.executor.spawn", lambda *_: subprocess.Popen(["sleep", "60"]))
    with pytest.raises(ExecutionError, match=r"rank 1 .*did not connect within executor\.start_timeout_s = 1"):
        parallel(model, pp=2, start_timeout_s=1.0)


def test_a_rank_that_dies_before_it_connects_is_named(model, monkeypatch):
    monkeypatch.setattr("intarsia_parallel.executor.spawn", lambda *_: subprocess.Popen(["false"]))
    with pytest.raises(ExecutionError, match=r"rank 1 .*ended with exit code 1, while the engine started"):
        parallel(model, pp=2)


# --- the engine's own end ---------------------------------------------------------------------------------------------

#: A shell that starts the tests in the background has them ignore SIGINT, which processes inherit.
SCRIPT = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path[:0] = {path}
from ranks import parallel, pids
from intarsia import SamplingParams

if __name__ == "__main__":
    engine = parallel({model!r}, pp=2, timeout_s={timeout_s})
    print(*pids(engine).values(), flush=True)
    while True:
        engine.generate([[1, 2, 3]] * 3, SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
"""


def started(model, tmp_path, timeout_s=10.0):
    """Run an engine in a process of its own; return it and the ids of its ranks."""
    script = tmp_path / "engine.py"
    script.write_text(SCRIPT.format(path=sys.path, model=str(model), timeout_s=timeout_s))
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    return process, [int(pid) for pid in process.stdout.readline().split()]


@pytest.mark.parametrize(
    "number",
    [signal.SIGKILL, *(pytest.param(each, marks=pytest.mark.slow) for each in (signal.SIGINT, signal.SIGTERM))],
)
def test_no_rank_outlives_its_engine_however_that_ends(model, tmp_path, number):
    process, ranks = started(model, tmp_path)
    assert ranks
    process.send_signal(number)
    process.wait(15)
    wait_until(lambda: all(map(is_gone, ranks)), 10)


@pytest.mark.slow
def test_a_stopped_rank_does_not_outlive_its_engine(model, tmp_path):
    process, ranks = started(model, tmp_path)
    os.kill(ranks[0], signal.SIGSTOP)
    process.kill()
    process.wait(15)
    wait_until(lambda: all(map(is_gone, ranks)), 10)


@pytest.mark.slow
def test_ranks_end_where_rank_0_hangs(model, tmp_path):
    process, ranks = started(model, tmp_path, timeout_s=3.0)
    process.send_signal(signal.SIGSTOP)
    try:
        wait_until(lambda: all(map(is_gone, ranks)), 20)
    finally:
        process.kill()
        process.wait(15)


@pytest.mark.slow
def test_a_pause_of_all_ranks_together_is_no_failure(model):
    """Ctrl-Z and fg: everybody was silent, and nobody hangs."""
    with parallel(model, pp=2, timeout_s=2.0) as engine:
        (pid,) = pids(engine).values()
        watcher = subprocess.Popen(
            [
                sys.executable,
                "-c",
                "import os, signal, sys, time\n"
                "pids = [int(each) for each in sys.argv[1:]]\n"
                "for pid in pids: os.kill(pid, signal.SIGSTOP)\n"
                "time.sleep(5)\n"
                "for pid in pids: os.kill(pid, signal.SIGCONT)\n",
                str(os.getpid()),
                str(pid),
            ],
            start_new_session=True,
        )
        completion = engine.generate([[1, 2, 3]], LONG)[0]
        watcher.wait(20)
        assert completion.finish_reason == "length"
        assert engine.generate([[1, 2, 3]], LONG)[0].token_ids == completion.token_ids


# --- behind a server --------------------------------------------------------------------------------------------------


def children_of(pid):
    """Return the process ids of a process's children."""
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()] or [
        int(each) for task in Path(f"/proc/{pid}/task").iterdir() for each in (task / "children").read_text().split()
    ]


@pytest.mark.slow
def test_clients_of_a_server_hear_which_rank_was_lost(model, tmp_path):
    options = ("executor.use=parallel", "executor.pp=2", 'engine.plugins.block=["cpu"]', "engine.max_model_len=512")
    args = [text for option in options for text in ("-o", option)]
    with process(tmp_path, model, *args) as server, Client(server.address) as client:
        with pytest.raises(ExecutionError, match=r"the engine failed: rank 1 \(stage 1 of 2.*SIGKILL"):
            for index, _ in enumerate(client.stream([1, 2, 3], SamplingParams(max_tokens=400, ignore_eos=True))):
                if index == 3:
                    (rank,) = children_of(server.process.pid)
                    os.kill(rank, signal.SIGKILL)
        assert server.wait() == 1, server.said()
        assert is_gone(rank)


SERVED = ("executor.use=parallel", "executor.tp=2", 'engine.plugins.block=["cpu"]', "engine.max_model_len=128")


@pytest.mark.slow
def test_a_server_whose_rank_is_lost_while_it_is_idle_ends_by_itself(model, tmp_path):
    """Nobody asks it anything: it must not go on saying that it is ready."""
    args = [text for option in SERVED for text in ("-o", option)]
    with process(tmp_path, model, *args) as server, Client(server.address) as client:
        client.generate([1, 2, 3], SamplingParams(max_tokens=4))
        (rank,) = children_of(server.process.pid)
        os.kill(rank, signal.SIGKILL)
        begun = time.monotonic()
        assert server.wait() == 1, server.said()
        assert time.monotonic() - begun < 15
        assert "rank 1 (" in server.said()


@pytest.mark.slow
def test_a_stream_goes_on_at_another_replica_where_a_rank_of_its_own_is_lost(model, tmp_path):
    """Two servers of two ranks each behind a router; what the client has is what one engine says."""
    args = [text for option in SERVED for text in ("-o", option)]
    params = SamplingParams(max_tokens=100, ignore_eos=True, temperature=0)
    with ExitStack() as stack:
        servers = []
        for number in range(2):
            (tmp_path / str(number)).mkdir()
            servers.append(stack.enter_context(process(tmp_path / str(number), model, *args)))
        for server in servers:
            with Client(server.address) as client:
                wanted = client.generate([1, 2, 3], params).token_ids
        addresses, turns = [server.address for server in servers], {"policy": "round_robin"}
        router = stack.enter_context(routing(tmp_path, addresses, route=turns))
        client = stack.enter_context(Client(router.address))
        # One on each, so that one of them loses its server.
        streams = [client.stream([1, 2, 3], params) for _ in servers]
        said, killed = [[] for _ in streams], False
        for outputs in zip_longest(*streams):
            for ids, output in zip(said, outputs, strict=True):
                ids += output.token_ids if output is not None else ()
            if not killed and all(len(ids) > 3 for ids in said):
                os.kill(*children_of(servers[0].process.pid), signal.SIGKILL)
                killed = True
        assert [tuple(ids) for ids in said] == [tuple(wanted)] * 2
        assert servers[0].wait() == 1 and servers[1].process.poll() is None
