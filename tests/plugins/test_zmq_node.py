"""The client in Node.js: it reads the golden vectors, and streams, cancels and resumes against live servers."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from intarsia_zmq.limits import SessionLimits
from proxy import Proxy
from serving import eventually, serving
from wire_server import WireServer, idle

ROOT = Path(__file__).parents[2]
NOTHING = {"running": 0, "in flight": 0, "bytes": 0}

pytestmark = pytest.mark.skipif(
    shutil.which("node") is None or shutil.which("npm") is None,
    reason="NODE AND NPM ARE NOT INSTALLED: the example client in Node.js is not tested",
)


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    """Install the example from its lock file; return what starts it."""
    folder = tmp_path_factory.mktemp("node") / "example"
    shutil.copytree(ROOT / "examples" / "node", folder, ignore=shutil.ignore_patterns("node_modules"))
    # Its binaries come with the package: nothing has to run at the install.
    command = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--prefer-offline"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr

    def start(*args):
        command = ["node", "client.mjs", *map(str, args)]
        return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    return start


def finish(process):
    out, err = process.communicate(timeout=30)
    return process.returncode, out, err.strip()


def test_it_reads_every_vector_and_writes_what_clients_say_with_the_same_bytes(node):
    code, out, err = finish(node("--vectors", ROOT / "docs" / "wire-vectors.json"))
    read, written = out.splitlines()
    done, of = read.removeprefix("read ").split(" of ")
    assert (code, err) == (0, "") and int(done) == int(of) >= 36
    assert {"hello that resumes", "generate from a chat", "credit", "cancel", "bye"} <= set(
        written.removeprefix("wrote alike: ").split(", ")
    )


def test_a_vector_that_is_read_otherwise_fails_the_check(node, tmp_path):
    text = (ROOT / "docs" / "wire-vectors.json").read_text()
    assert text.count('"credit"') and text.count(" Paris") >= 1
    (tmp_path / "wrong.json").write_text(text.replace(" Paris", " Rome"))
    code, _, err = finish(node("--vectors", tmp_path / "wrong.json"))
    assert code == 1 and "read wrongly" in err


def test_it_streams_a_prompt_and_leaves_nothing_behind(node):
    with WireServer() as server:
        code, out, err = finish(node("--address", server.address, "--max-tokens", "9", "two", "words"))
        assert (code, out, err) == (0, "<0><1><2>", "length, 1 tokens")
        (asked,) = server.double.asked
        assert asked.request.prompt == "two words" and asked.request.params.max_tokens == 9
        eventually(lambda: server.do(lambda: (idle(server.double), len(server.double.sessions))) == (NOTHING, 0))


def test_it_says_that_it_waits_for_a_server_that_is_not_there(node, tmp_path):
    process = node("--address", f"ipc://{tmp_path}/nobody", "x")
    assert process.stderr.readline() == f"no answer from ipc://{tmp_path}/nobody yet; waiting for it\n"
    process.kill()
    assert finish(process)[1] == ""


def _answering(server, ids):
    """Let the server answer every text with these ids: [first, count]."""
    answer = type(server.double)._answer

    def call(connection, message):
        if message.kind == "generate":
            message.body["prompt"] = ids
        return answer(server.double, connection, message)

    server.double._answer = call


def test_more_than_a_window_comes_as_it_is_read(node):
    with WireServer() as server:
        _answering(server, [0, 500])
        assert finish(node("--address", server.address, "x"))[1] == "".join(f"<{i}>" for i in range(500))
        assert server.double.heard.count("credit") >= 3


def test_ctrl_c_cancels_the_request_and_prints_its_end(node):
    with WireServer() as server:
        _answering(server, [0, 0])
        process = node("--address", server.address, "x")
        assert process.stdout.read(9) == "<0><1><2>"
        os.kill(process.pid, signal.SIGINT)
        code, _, err = finish(process)
        assert code == 0 and err.startswith("abort") and "cancel" in server.double.heard
        eventually(lambda: server.do(lambda: (idle(server.double), len(server.double.sessions))) == (NOTHING, 0))


def test_a_connection_that_is_cut_loses_and_doubles_nothing(node):
    limits = SessionLimits(heartbeat_s=1, grace_s=20, credit=64)
    with WireServer(pace_s=0.002, limits=limits) as server, Proxy(server.address) as proxy:
        _answering(server, [0, 600])
        process = node("--address", proxy.address, "x")
        text = process.stdout.read(12)
        for _ in range(2):
            proxy.cut()
            text += process.stdout.read(600)
        # `communicate` would miss what is buffered here.
        out = text + process.stdout.read()
        assert process.wait(10) == 0 and process.stderr.read().strip().startswith("length")
        assert out == "".join(f"<{i}>" for i in range(600)) and proxy.connections >= 3


def test_the_server_itself_answers_it_and_its_refusals_end_it_with_a_message(node, tmp_path):
    with serving(tmp_path, bind="tcp://127.0.0.1:*") as running:
        assert finish(node("--address", running.address, "--max-tokens", "5", "x")) == (0, "", "length, 5 tokens")
        code, out, err = finish(node("--address", running.address, "refuse me"))
        assert (code, out) == (1, "") and "invalid: prompt: refused" in err
