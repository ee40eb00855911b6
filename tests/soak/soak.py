"""A server process among clients that come, ask, cancel, vanish and stop at random, for as long as you like.

`python tests/soak/soak.py --seconds 600` prints the server's memory and what it holds every 30 seconds, and fails
unless memory has stayed flat and, at the end, no page, request or session is left behind. No part of the suite.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

from intarsia import SamplingParams
from intarsia.errors import IntarsiaError
from intarsia_zmq import Client
from proxy import Proxy
from server_process import figures, left_behind, process, ready, tiny_model
from serving import Peer, eventually

#: A pool that is soon full, so that its pages are reused all the time, and its books have their full size early.
OPTIONS = (
    "cache.memory=4MiB",
    "frontend=zmq",
    "frontend.heartbeat_s=0.5",
    "frontend.grace_s=2",
    "frontend.stall_timeout_s=5",
)
#: What memory may grow by between the means of the first and the last third: what allocators keep wanders by a few MiB.
SLACK = 0.03
SLACK_BYTES = 8 << 20
#: Threads that act at once.
ACTORS = 12
#: What comes before the first sample: buffers and pages that are touched once, and then kept.
WARM_UP_S = 20.0
#: One answer that is known, and asked for again and again.
CHECKED = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)


def asked(rng: random.Random) -> SamplingParams:
    """Return parameters of some request."""
    return SamplingParams(
        max_tokens=rng.choice((1, 20, 200, 2000)),
        temperature=rng.choice((0.0, 1.0)),
        n=rng.choice((1, 1, 1, 4)),
        logprobs=rng.choice((None, None, 2)),
        ignore_eos=True,
    )


def prompt(rng: random.Random) -> list[int]:
    """Return a prompt that may share its beginning with others."""
    return [rng.randrange(4)] * rng.choice((1, 40, 1500)) + [rng.randrange(250) for _ in range(rng.randrange(1, 20))]


# --- what clients do --------------------------------------------------------------------------------------------------


def reads(address: str, rng: random.Random) -> None:
    """Read streams to their end."""
    with Client(address, timeout_s=30) as client:
        for _ in range(rng.randrange(1, 4)):
            for _ in client.stream(prompt(rng), asked(rng)):
                pass


def waits(address: str, rng: random.Random) -> None:
    """Have several whole answers."""
    with Client(address, timeout_s=30) as client:
        client.generate([prompt(rng) for _ in range(rng.randrange(1, 6))], asked(rng), deadline_s=10)


def cancels(address: str, rng: random.Random) -> None:
    """Leave streams somewhere."""
    with Client(address, timeout_s=30) as client:
        streams = [client.stream(prompt(rng), asked(rng)) for _ in range(rng.randrange(1, 5))]
        for stream in streams:
            for _ in range(rng.randrange(5)):
                next(stream, None)
            stream.close()


def vanishes(address: str, rng: random.Random) -> None:
    """Be gone without a word, some of it read."""
    with Peer(address, hello=True) as peer:
        for name in "abc":
            peer.generate(name, max_tokens=2000, prompt=prompt(rng), sampling={"n": rng.choice((1, 4))})
        time.sleep(rng.random())


def is_cut(address: str, rng: random.Random) -> None:
    """Have the connection cut, and get what is missing."""
    with Proxy(address) as proxy, Client(proxy.address, timeout_s=30, credit=16) as client:
        for _ in range(3):
            proxy.bytes_left = rng.randrange(200, 20_000)
            for _ in client.stream(prompt(rng), asked(rng)):
                pass


def stops(address: str, rng: random.Random) -> None:
    """Be stopped as a process for a while, shorter or longer than the grace time, and go on, or be killed."""
    code = (
        "import sys; from intarsia import SamplingParams; from intarsia_zmq import Client\n"
        "for _ in Client(sys.argv[1], timeout_s=5).stream([5, 6], SamplingParams(max_tokens=3000, n=2)): pass"
    )
    command = [sys.executable, "-c", code, address]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as child:
        time.sleep(1 + rng.random())
        child.send_signal(signal.SIGSTOP)
        time.sleep(rng.choice((0.5, 2.0, 6.0)))
        child.send_signal(rng.choice((signal.SIGCONT, signal.SIGKILL)))
        time.sleep(1)
        child.kill()


def stalls(address: str, rng: random.Random) -> None:
    """Grant no credit and stay."""
    with Peer(address, hello=True) as peer:
        peer.generate(max_tokens=3000, prompt=prompt(rng), credit=2, sampling={"ignore_eos": True})
        for _ in range(int(rng.random() * 14)):
            time.sleep(0.5)
            peer.send("ping")


def lies(address: str, rng: random.Random) -> None:
    """Say what is no message, or wrong."""
    with Peer(address, hello=rng.random() < 0.8) as peer:
        for _ in range(50):
            peer.send_raw(*(rng.randbytes(rng.randrange(200)) for _ in range(rng.randrange(1, 4))))
            peer.generate("x", prompt=prompt(rng), sampling={"temperature": rng.choice((0, -1, "hot"))}, max_tokens=2)
        time.sleep(0.2)


#: How often each, of all together.
ACTS = {reads: 5, waits: 4, cancels: 5, vanishes: 4, is_cut: 3, stops: 1, stalls: 1, lies: 2}


# --- the soak ---------------------------------------------------------------------------------------------------------


class Soak:
    """Actors around a server, and what was seen."""

    def __init__(self, address: str, seed: int) -> None:
        self.address, self.seed = address, seed
        self.stopping = threading.Event()
        self.did, self.errors, self.wrong = Counter[str](), Counter[str](), list[str]()
        self.threads = [threading.Thread(target=self.act, args=(index,)) for index in range(ACTORS)]
        self.threads.append(threading.Thread(target=self.check))

    def act(self, index: int) -> None:
        """Do one thing after another."""
        rng = random.Random(f"{self.seed} {index}")
        while not self.stopping.wait(rng.expovariate(2.0)):
            (what,) = rng.choices(list(ACTS), list(ACTS.values()))
            try:
                what(self.address, rng)
            except IntarsiaError as error:  # such as a stream that was too slow, or a server that is full
                self.errors[f"{what.__name__}: {type(error).__name__}"] += 1
            except Exception as error:
                self.wrong.append(f"{what.__name__}: {type(error).__name__}: {error}")
            self.did[what.__name__] += 1

    def check(self) -> None:
        """Have the same answer again and again: what others do does not change it."""
        expected = None
        with Client(self.address, timeout_s=60) as client:
            while not self.stopping.is_set():
                found = client.generate([5, 6, 7], CHECKED).token_ids
                expected = expected or found
                if found != expected:
                    self.wrong.append(f"an answer has changed: {found}, and not {expected}")
                self.did["checks"] += 1


def watch(soak: Soak, running: object, seconds: float, every_s: float) -> list[int]:
    """Sample the server's memory until the time is over, and print what it holds; return the bytes of each sample."""
    memory, begun, print_at = [], time.monotonic(), 0.0
    server = psutil.Process(running.process.pid)
    while (now := time.monotonic() - begun) < seconds:
        if now >= min(WARM_UP_S, seconds / 6):
            memory.append(server.memory_info().rss)
        if now >= print_at:
            print_at += every_s
            says, engine = figures(running)
            held = {name: says[name] for name in ("sessions", "in_flight", "waiting", "kept_bytes")}
            pool = {name: engine["cache"][name] for name in ("used", "cached", "free")}
            print(f"{now:5.0f} s  {server.memory_info().rss / 2**20:7.1f} MiB  {held}  pages {pool}", flush=True)
        time.sleep(min(1.0, seconds / 60))
    return memory


def main() -> int:
    """Run; return 1 where something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--every", type=float, default=30.0, help="seconds between two lines")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options = [part for option in OPTIONS for part in ("-o", option)]
        with process(folder, tiny_model(folder), *options) as running:
            return run(running, asked)


def run(running: object, asked: argparse.Namespace) -> int:
    """Soak a server that has started."""
    with Peer(running.address, hello=True) as peer:
        ready(peer)
    soak = Soak(running.address, asked.seed)
    for thread in soak.threads:
        thread.start()
    try:
        memory = watch(soak, running, asked.seconds, asked.every)
    finally:
        soak.stopping.set()
        for thread in soak.threads:
            thread.join(120)
    print("did:", dict(soak.did), "\nerrors that clients were told:", dict(soak.errors))
    third = max(1, len(memory) // 3)
    first, last = statistics.fmean(memory[:third]), statistics.fmean(memory[-third:])
    print(f"memory, first and last third: {first / 2**20:.1f} and {last / 2**20:.1f} MiB")
    eventually(lambda: not left_behind(running), 60)
    assert all(not thread.is_alive() for thread in soak.threads), "a client does not end"
    assert not soak.wrong, soak.wrong
    assert running.process.poll() is None and "Traceback" not in running.said(), running.said()
    assert soak.did["checks"] > 0 and all(soak.did[act.__name__] for act in ACTS), "it was too short for everything"
    assert last - first <= max(SLACK * first, SLACK_BYTES), f"memory grew by {(last - first) / 2**20:.1f} MiB"
    print("flat memory, an idle pool, no sessions, no requests")
    return 0


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())
