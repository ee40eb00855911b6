"""The commands around a server: what they print, what they exit with, and that they need no torch."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from intarsia.cli import run
from intarsia_zmq.changes import read_changes
from intarsia_zmq.keys import read_key_pair, read_public_key
from intarsia_zmq.swap_command import control_of
from serving import FakeEngine, eventually, serving
from wire_server import WireServer, idle


@pytest.fixture
def cli(capsys, monkeypatch):
    """Run a command in this process; return (exit code, stdout, stderr)."""

    def call(*args, stdin=b""):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        capsys.readouterr()
        code = run([str(arg) for arg in args])
        out, err = capsys.readouterr()
        return code, out, err

    return call


@pytest.fixture
def server():
    with WireServer() as one:
        yield one


# --- client -----------------------------------------------------------------------------------------------------------


def test_the_answer_is_printed_as_text_and_ends_with_a_line_break(cli, server):
    assert cli("client", "--address", server.address, "hello") == (0, "<0><1><2>\n", "")
    (asked,) = server.double.asked
    assert asked.request.prompt == "hello" and asked.stream


def test_a_prompt_on_stdin_loses_the_shells_line_break_alone(cli, server):
    assert cli("client", "--address", server.address, stdin=b"a\nb\n")[0] == 0
    assert server.double.asked[0].request.prompt == "a\nb"
    assert cli("client", "--address", server.address, stdin=b"\xff")[0] == 2


def test_options_become_sampling_parameters(cli, server):
    options = "--max-tokens 7 --temperature 0.5 --top-k 3 --stop a --stop b --seed 9 -n 2 --priority 4 --deadline 60"
    code, out, _ = cli("client", "--address", server.address, *options.split(), "x")
    (asked,) = server.double.asked
    params = asked.request.params
    assert (params.max_tokens, params.temperature, params.top_k, params.stop) == (7, 0.5, 3, ("a", "b"))
    assert (params.seed, params.n, asked.request.priority, asked.deadline_s) == (9, 2, 4, 60)
    assert (code, out) == (0, "--- choice 0\n<0><1><2>\n--- choice 1\n<0><1><2>\n")


def test_options_of_logits_processors_are_json_or_texts(cli, server):
    texts = ("a.regex=[a-z]{2}=", 'a.choice=["x", "y"]', "a.json=true", "b.c.d=1")
    assert (
        cli("client", "--address", server.address, *(w for t in texts for w in ("--logits-processor", t)), "x")[0] == 0
    )
    (asked,) = server.double.asked
    expected = {"a": {"regex": "[a-z]{2}=", "choice": ["x", "y"], "json": True}, "b": {"c.d": 1}}
    assert asked.request.params.logits_processors == expected
    for wrong in ("a=1", "a.=1", ".b=1", "a.b"):
        code, out, err = cli("client", "--address", server.address, "--logits-processor", wrong, "x")
        assert (code, out) == (2, "") and repr(wrong) in err and "KEY.OPTION=VALUE" in err


def test_json_is_one_object_with_what_engines_say(cli, server):
    code, out, err = cli("client", "--address", server.address, "--json", "-n", "2", "x")
    data = json.loads(out)
    assert (code, err, data["text"], data["token_ids"], data["seed"]) == (0, "", "<0><1><2>", [0, 1, 2], 7)
    assert data["finish_reason"] == "length" and data["usage"]["prompt_tokens"] == 2 and len(data["choices"]) == 2


def test_chat_makes_the_prompt_a_users_message(cli, server, monkeypatch):
    heard = []
    answer = server.double._answer

    def note(connection, message):
        if message.kind == "generate":
            heard.append(message.body["prompt"])
            message.body["prompt"] = "x"
        return answer(connection, message)

    monkeypatch.setattr(server.double, "_answer", note)
    assert cli("client", "--address", server.address, "--chat", "hello")[0] == 0
    assert heard[0]["messages"] == [{"role": "user", "content": "hello"}]


def test_what_goes_wrong_is_one_line_and_a_code(cli, tmp_path):
    code, out, err = cli("client", "--address", "tcp://127.0.0.1:9", "--timeout", "0.2", "x")
    assert code != 0 and out == "" and "no connection to the server within 0.2 s" in err and err.count("\n") == 1
    assert cli("client", "--address", "nowhere", "x")[0] == 2
    assert cli("client", "--temperature", "-1", "x")[0] == 2
    with serving(tmp_path) as running:
        code, out, err = cli("client", "--address", running.address, "refuse me")
        assert (code, out) == (2, "") and "refused" in err
        code, _, err = cli("client", "--address", running.address, "--max-tokens", "9", "fail midway")
        assert code == 1 and "ended with an error" in err


def test_ctrl_c_cancels_the_request_and_says_nothing(server):
    server.double._answer = _endless(server.double)
    program = "import sys; from intarsia.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "client", "--address", server.address, "x"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.read(6) == "<0><1>"
    os.kill(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=10)
    assert (process.returncode, err) == (130, "")
    eventually(lambda: server.do(lambda: (idle(server.double), len(server.double.sessions))) == ({**_NOTHING}, 0))


_NOTHING = {"running": 0, "in flight": 0, "bytes": 0}


def _endless(double):
    answer = type(double)._answer

    def call(connection, message):
        if message.kind == "generate":
            message.body["prompt"] = [0, 0]
        return answer(double, connection, message)

    return call


# --- health -----------------------------------------------------------------------------------------------------------


def test_health_is_0_where_the_server_is_ready_and_1_with_the_reason_where_not(cli, tmp_path):
    with serving(tmp_path) as running:
        control = running.server.addresses["control"]
        eventually(lambda: running.control("status").body["state"] == "ready")
        for where in (("--address", running.address), ("--control", control)):
            assert cli("health", *where) == (0, "ready\n", "")
        running.control("pause")
        for where in (("--address", running.address), ("--control", control)):
            assert cli("health", *where)[:2] == (1, "not healthy: paused\n")
        running.control("resume")
        running.control("drain")
        assert cli("health", "--address", running.address)[:2] == (1, "not healthy: draining\n")
    for where in (("--address", running.address), ("--control", control)):
        began = time.monotonic()
        code, out, _ = cli("health", *where, "--timeout", "0.3")
        assert code == 1 and "within 0.3 s" in out and time.monotonic() - began < 3
    assert cli("health", "--address", "nowhere")[0] == 2


def test_health_is_1_where_there_is_work_and_the_last_step_is_too_old(cli, tmp_path):
    engine = FakeEngine()
    with serving(tmp_path, engine) as running:
        eventually(lambda: running.control("status").body["state"] == "ready")
        engine.may_step.clear()
        from intarsia_zmq import Client

        with Client(running.address, timeout_s=5) as client:
            stream = client.stream("x")
            eventually(lambda: (running.control("status").body["step_age_s"] or 0) > 0.3)
            for where in (("--address", running.address), ("--control", running.server.addresses["control"])):
                assert cli("health", *where)[0] == 0
                code, out, _ = cli("health", *where, "--max-step-age", "0.2")
                assert code == 1 and "there is work" in out
            stream.close()
        engine.may_step.set()


# --- control ----------------------------------------------------------------------------------------------------------


def test_control_says_each_verb_and_prints_the_answer(cli, tmp_path, monkeypatch):
    with serving(tmp_path) as running:
        eventually(lambda: running.control("status").body["state"] == "ready")

        def control(*args):
            code, out, err = cli("control", "--control", running.server.addresses["control"], *args)
            return code, json.loads(out) if code == 0 else err

        assert control("status")[1]["state"] == "ready"
        assert control("pause")[1]["state"] == "paused" and control("resume")[1]["state"] == "ready"
        assert control("drain")[1]["state"] == "draining" and control("resume")[1]["state"] == "ready"
        told = control("reload", "limits.requests=7", "log_level=warning", "bind=tcp://127.0.0.1:1")[1]
        assert sorted(told["applied"]) == ["limits.requests", "log_level"] and told["restart"] == ["bind"]
        code, err = control("reload", "limits.requests=0")
        assert code == 2 and "limits.requests" in err
        assert control("shutdown")[0] == 0
        running.join()
    code, _, err = cli("control", "--control", f"ipc://{tmp_path}/control", "--timeout", "0.2", "status")
    assert code != 0 and "no answer within 0.2 s" in err
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    code, _, err = cli("control", "status")
    assert code == 2 and "XDG_RUNTIME_DIR" in err and "frontend.control=ipc://" in err


def test_changes_are_read_as_json_or_text_by_path():
    assert read_changes(("limits.requests=3", "limits.sessions=4", "log_level=debug", "grace_s=1.5")) == {
        "limits": {"requests": 3, "sessions": 4},
        "log_level": "debug",
        "grace_s": 1.5,
    }
    from intarsia.errors import ConfigError

    for wrong in (("x",), ("=3",), ("a..b=1",), ("a=1", "a.b=2")):
        with pytest.raises(ConfigError):
            read_changes(wrong)


# --- swap and live ----------------------------------------------------------------------------------------------------


def test_swap_says_what_was_done_and_fails_by_name(cli, tmp_path):
    with serving(tmp_path) as running:
        eventually(lambda: running.control("status").body["state"] == "ready")
        where = ("--control", running.server.addresses["control"])
        code, out, _ = cli("swap", "scheduler=static", *where)
        assert (code, out) == (0, "scheduler: inflight -> static in 250.0 ms; none was running\n")
        code, out, _ = cli("swap", "scheduler=inflight", "--json", *where)
        assert code == 0 and json.loads(out)["after"] == "inflight"
        code, out, err = cli("swap", "scheduler=static", "-o", "scheduler.x=1", *where)
        assert (code, out) == (2, "") and "scheduler.x: unknown option" in err
        code, _, err = cli("swap", "cache=paged", *where)
        assert code == 2 and "cannot be replaced" in err
        code, _, err = cli("swap", "scheduler=broken", *where)
        assert code == 2 and "did not take over" in err


def test_swap_finds_the_control_socket_of_an_address(cli, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with serving(tmp_path, bind="tcp://127.0.0.1:*", control=f"ipc://{tmp_path}/intarsia-77.control"):
        code, _, err = cli("swap", "scheduler=static", "--address", "tcp://127.0.0.1:77")
        assert code == 0 or "starting" in err
    assert control_of("ipc:///somewhere/data.ipc") == f"ipc://{tmp_path}/intarsia-data.ipc.control"
    code, _, err = cli("swap", "scheduler=static", "--address", "tcp://192.168.0.9:5555")
    assert code == 2 and "beyond this machine" in err


@pytest.mark.parametrize(
    "args",
    [
        ("scheduler",),
        ("=static",),
        ("scheduler=",),
        ("scheduler.use=static",),
        ("scheduler=static", "-o", "cache.page_size=3"),
        ("scheduler=static", "-o", "scheduler=inflight"),
        ("scheduler=static", "-o", "scheduler.max_batch"),
    ],
)
def test_a_swap_that_is_no_swap_is_refused_before_anything_is_asked(cli, args):
    code, out, err = cli("swap", *args)
    assert (code, out) == (2, "") and "Traceback" not in err and "is a server there" not in err


PART = {"provider": "inflight (intarsia 1)", "asked_by": "auto", "reason": "fills every step anew\x1b[2J"}
SPENT = {
    "scheduler.inflight": {"seconds": 0.25, "calls": 1234, "share": 0.125},
    "core.loop": {"seconds": 1.75, "calls": 7, "share": 0.875},
}


class Told(FakeEngine):
    """Says of itself what an engine does."""

    def explain(self):
        done = {"slot": "scheduler", "before": "static", "after": "inflight", "time": 1.5, "seconds": 0.5}
        parts = {"scheduler": {"key": "inflight", **PART}, "kernels": {"key": "a+b", "all": [{"key": "a", **PART}]}}
        return super().explain() | {"parts": parts, "swaps": [done | {"sequences": 3, "kept": 2}]}

    def stats(self):
        return super().stats() | {"time": SPENT, "generated_tokens": 9}


def test_live_shows_parts_with_their_time_what_was_swapped_and_the_state(cli, tmp_path):
    with serving(tmp_path, Told()) as running:
        eventually(lambda: running.control("status").body["state"] == "ready")
        code, out, _ = cli("live", "--address", running.address)
        assert code == 0
        table, swaps, state = out.split("\n\n")
        rows = [line.split() for line in table.splitlines()]
        assert rows[0] == ["slot", "part", "provider", "by", "share", "seconds", "calls", "why"]
        assert rows[1][:2] == ["scheduler", "inflight"] and {"12.5%", "0.250", "1234"} <= set(rows[1])
        assert rows[2][:2] == ["kernels", "a"] and "%" not in table.splitlines()[2]
        assert rows[3] == ["core", "loop", "87.5%", "1.750", "7"]
        assert "\x1b" not in out and "scheduler: static -> inflight in 500.0 ms; 3 sequences go on, 2" in swaps
        assert state.startswith("ready: 0 sequences run, 0 wait; 0 steps, 9 tokens") and state.endswith("hash abc\n")
        for command in (("live",), ("explain", "--live")):
            code, out, _ = cli(*command, "--address", running.address, "--json")
            told = json.loads(out)
            assert code == 0 and told["explained"]["hash"] == "abc" and told["figures"]["engine"]["time"] == SPENT


@pytest.mark.parametrize(
    "args", [("--address", "tcp://127.0.0.1:1"), ("--live", "-m", "smollm2"), ("--live", "-o", "scheduler=static")]
)
def test_what_means_nothing_beside_live_is_refused(cli, args):
    code, out, err = cli("explain", *args)
    assert (code, out) == (2, "") and "--live" in err


# --- keygen -----------------------------------------------------------------------------------------------------------


def test_keygen_writes_pairs_once_and_says_what_to_do_with_them(cli, tmp_path):
    folder = tmp_path / "keys"
    code, out, err = cli("keygen", folder)
    made = [folder / name for name in ("server.key", "server.key_secret", "client.key", "client.key_secret")]
    assert code == 0 and [Path(line) for line in out.splitlines()] == made
    assert "server_key" in err and "client_keys" in err and f"{folder}/server.key_secret" in err
    for name in ("server", "client"):
        secret = folder / f"{name}.key_secret"
        assert secret.stat().st_mode & 0o777 == 0o600
        pair = read_key_pair(secret)
        assert read_public_key(folder / f"{name}.key") == pair.public
        assert pair.secret.decode() not in out + err
    before = {path: path.read_bytes() for path in folder.iterdir()}
    code, out, err = cli("keygen", folder, "--name", "new", "--name", "client")
    assert code == 2 and "is there already" in err and out == ""
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    code, _, err = cli("keygen", folder, "--name", "alice")
    assert code == 0 and (folder / "alice.key").exists()
    assert (
        f"--server-key SERVER.key --key {folder}/alice.key_secret" in err and 'server_key = "SERVER.key_secret"' in err
    )
    assert (
        f"--server-key {tmp_path}/server.key --key CLIENT.key_secret" in cli("keygen", tmp_path, "--name", "server")[2]
    )
    assert cli("keygen", folder, "--name", "../up")[0] == 2


def test_keys_of_keygen_open_a_server_that_wants_them(cli, tmp_path):
    keys, allowed = tmp_path / "keys", tmp_path / "allowed"
    assert cli("keygen", keys)[0] == 0
    allowed.mkdir()
    (allowed / "client.key").write_text((keys / "client.key").read_text())
    options = {"server_key": str(keys / "server.key_secret"), "client_keys": str(allowed)}
    with serving(tmp_path, bind="tcp://127.0.0.1:*", **options) as running:
        eventually(lambda: running.control("status").body["state"] == "ready")
        own = ("--server-key", keys / "server.key", "--key", keys / "client.key_secret")
        # The server is in this process, and may log meanwhile that it has looked at the keys again.
        assert cli("health", "--address", running.address, *own)[:2] == (0, "ready\n")
        code, out, _ = cli("health", "--address", running.address, "--timeout", "1")
        assert code == 1 and "CURVE" in out


def test_the_commands_start_without_torch():
    code = (
        "import sys, intarsia_zmq.commands, intarsia_zmq.aio; "
        "print([m for m in ('torch', 'numpy', 'transformers') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
