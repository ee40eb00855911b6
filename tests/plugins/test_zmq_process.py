"""The real process: `intarsia serve` with a real engine, and signals."""

import json
import signal
import subprocess
import sys
import time

import pytest

from server_process import process, ready, tiny_model
from serving import Peer, eventually

GREEDY = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"))


def test_a_default_start_listens_on_loopback_alone_and_sigterm_drains_and_ends_well(tmp_path, model):
    with process(tmp_path, model) as running, Peer(running.address, hello=True) as peer:
        ready(peer)
        assert running.listening() == {"0100007F"}
        peer.generate(max_tokens=1500, prompt=[5, 6], sampling=GREEDY, credit=1024)
        first = peer.next()
        running.process.send_signal(signal.SIGTERM)
        eventually(lambda: running.find("draining"))
        peer.generate("late", prompt=[5], sampling=GREEDY)
        peer.send("credit", "r", received=0, upto=1024)
        counts, late, last = len(first.body["token_ids"]), None, None
        while last is None or late is None:
            message = peer.next()
            if message.kind == "delta":
                counts += len(message.body["token_ids"])
                if message.seq % 256 == 0:
                    peer.send("credit", "r", received=message.seq, upto=message.seq + 1024)
            elif message.id == "late":
                late = message.body["code"]
            elif message.kind == "done":
                last = message
        assert counts == 1500 and late == "draining" and last.body["usage"]["completion_tokens"] == 1500
        peer.send("credit", "r", received=last.seq, upto=0)
        assert running.wait() == 0, running.said()


def _state(peer):
    peer.send("ping")
    while True:
        message = peer.next()
        if message.kind == "pong":
            return message.body["state"]


def test_a_second_signal_stops_at_once(tmp_path, model):
    with process(tmp_path, model) as running, Peer(running.address, hello=True) as peer:
        ready(peer)
        peer.generate(max_tokens=4000, prompt=[5], sampling=GREEDY, credit=1)
        peer.next()
        running.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        assert running.process.poll() is None
        begun = time.monotonic()
        running.process.send_signal(signal.SIGTERM)
        assert running.wait() == 128 + signal.SIGTERM and time.monotonic() - begun < 5
        assert "Traceback" not in running.said()


def test_answers_over_the_wire_are_those_of_the_engine_and_the_pool_is_idle_after(tmp_path, model):
    from engines import engine_of

    params = {"temperature": 0.8, "seed": 7, "max_tokens": 20, "ignore_eos": True, "logprobs": 2}
    from intarsia import SamplingParams

    with engine_of(model) as engine:
        (expected,) = engine.generate([[5, 6, 7]], SamplingParams(**params))
    with process(tmp_path, model) as running, Peer(running.address, hello=True) as peer:
        ready(peer)
        assert peer.ask("explain").body["model"]["family"] == "llama"
        peer.send("generate", "r", prompt=[5, 6, 7], sampling=params)
        assert tuple(peer.until_end()[1]) == expected.token_ids
        for name in "abc":
            peer.generate(name, max_tokens=3000, prompt=[5, 6], sampling=GREEDY | {"n": 2})
        for name in "abc":
            peer.send("cancel", name)
        for name in "abc":
            peer.until_end(name)
        engine = peer.ask("stats").body["engine"]
        assert engine["running"] == engine["waiting"] == 0
        assert (
            engine["cache"]["free"] + engine["cache"]["cached"]
            >= engine["cache"]["num_pages"] - engine["cache"]["used"]
        )
        assert engine["cache"]["used"] == 0, json.dumps(engine)


def test_a_bad_address_or_config_ends_the_process_before_a_model_is_loaded(tmp_path, model):
    code = "from intarsia.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "serve", "-m", str(model), "--bind", "tcp://0.0.0.0:5555"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2 and "keygen" in done.stderr and "frontend.bind" in done.stderr
