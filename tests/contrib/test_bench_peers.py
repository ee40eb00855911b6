"""Peers: child processes that are asked over stdin and stdout, one workload at a time."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from intarsia.cli import run
from intarsia.errors import ConfigError, ExecutionError
from intarsia_bench.peer import MODELS, Peer, command_of
from intarsia_bench.peers import workloads
from serving import eventually

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "contrib/intarsia_bench/peers"

#: A peer as the real ones are: an engine that is loud, and the protocol around it.
FAKE = f"""
import os, sys
sys.path.insert(0, {str(SCRIPTS)!r})
import workloads

protocol = workloads.own_stdout()
print("a library says hello")
os.system("echo so does a child of its own")

def generate(requests):
    print("generating", len(requests), [n for _, n in requests][:1], os.environ["OMP_NUM_THREADS"], file=sys.stderr)
    print("OMP_WAIT_POLICY" in os.environ, sys.argv[1:], file=sys.stderr)

workloads.serve(protocol, generate)
"""


@pytest.fixture
def fake(tmp_path):
    path = tmp_path / "fake.py"
    path.write_text(FAKE)
    return path


def test_a_peer_runs_what_it_is_asked_for_and_ends_when_it_is_closed(fake):
    peer = Peer.start("fake", [sys.executable, str(fake)], threads=3)
    process = peer._process
    for name in ("decode1", "mixed", "decode1"):
        assert peer.measure(name, 0).seconds < 5
        assert peer.measure(name, 1).latencies is None
    assert process.poll() is None
    peer.close()
    assert process.returncode == 0
    peer.close()


def test_a_peer_stands_still_while_others_are_measured(tmp_path):
    path = tmp_path / "spinning.py"
    path.write_text(
        FAKE.replace(
            "protocol =",
            "import threading\n\ndef spin():\n    while True:\n        pass\n\n"
            "threading.Thread(target=spin, daemon=True).start()\nprotocol =",
        )
    )
    peer = Peer.start("spinning", [sys.executable, str(path)], threads=1)
    stat = Path(f"/proc/{peer._process.pid}/stat")
    if not stat.exists():
        peer.close()
        pytest.skip("this system does not tell what a process is doing")
    for repeat in range(2):
        eventually(lambda: stat.read_text().split()[2] == "T")
        assert peer.measure("decode1", repeat).seconds < 5
    peer.close()
    assert peer._process.returncode == 0


def test_a_peer_gets_its_threads_and_not_the_way_ours_wait(fake, monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    peer = Peer.start("fake", [sys.executable, str(fake), "a-model"], threads=3)
    peer.measure("decode16", 0)
    peer._end()
    peer._log.seek(0)
    said = peer._log.read().decode()
    peer.close()
    # The warm-up, the work, and the same work with one token.
    assert "generating 1 [4] 3\nFalse ['a-model']" in said
    assert "generating 16 [33] 3" in said and "generating 16 [1] 3" in said
    assert "a library says hello" in said and "so does a child" in said


@pytest.mark.parametrize(
    "body, message",
    [
        (
            "raise SystemExit('no such model')",
            r"peer fake: it has ended \(exit code 1\); its last words: no such model",
        ),
        ("print('hello', flush=True); input()", r"it said 'hello\\n', which is no 'ready'"),
        ("print('[1]', flush=True); input()", r"it said '\[1\]\\n', which is no 'ready'"),
    ],
)
def test_a_peer_that_does_not_come_up_is_told_with_its_last_words(body, message, tmp_path):
    script = tmp_path / "broken.py"
    script.write_text(body)
    with pytest.raises(ExecutionError, match=message):
        Peer.start("fake", [sys.executable, str(script)], threads=1)


def test_a_peer_that_dies_at_work_is_told(tmp_path):
    script = tmp_path / "dying.py"
    script.write_text("print('{\"ready\": true}', flush=True)\ninput()\nraise SystemExit('out of memory')")
    peer = Peer.start("fake", [sys.executable, str(script)], threads=1)
    with pytest.raises(ExecutionError, match="its last words: out of memory"):
        peer.measure("mixed", 0)
    with pytest.raises(ExecutionError, match="it has ended"):
        peer.measure("mixed", 1)
    peer.close()


def test_a_peer_that_does_not_stop_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr("intarsia_bench.peer._PATIENCE_S", 0.2)
    script = tmp_path / "stubborn.py"
    script.write_text("import time\nprint('{\"ready\": true}', flush=True)\ntime.sleep(600)")
    peer = Peer.start("fake", [sys.executable, str(script)], threads=1)
    peer.close()
    assert peer._process.returncode == -9


def install(home, name, model, script):
    """Make what `make peers` would: a Python that runs the fake whatever script it is given, and a model."""
    python = home / name / "bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nshift\nexec {sys.executable} {script} "$@"\n')
    python.chmod(0o755)
    (home / "models").mkdir(exist_ok=True)
    (home / "models" / model).touch()


def test_a_peer_is_found_where_make_peers_puts_it(fake, tmp_path):
    for name, default in MODELS.items():
        install(tmp_path, name, default, fake)
        python, script, path = command_of(name, tmp_path)
        assert python == str(tmp_path / name / "bin/python")
        assert Path(script).exists()
        assert path == str(tmp_path / "models" / default)
    (tmp_path / "models/Q8_0.gguf").touch()
    assert command_of("llamacpp:Q8_0.gguf", tmp_path)[2] == str(tmp_path / "models/Q8_0.gguf")


def test_a_peer_that_is_not_there_names_make_peers(fake, tmp_path):
    with pytest.raises(
        ConfigError, match=r"--peer vllm: .* not installed: there is no .*vllm/bin/python; `make peers`"
    ):
        command_of("vllm", tmp_path)
    install(tmp_path, "llamacpp", "BF16.gguf", fake)
    with pytest.raises(ConfigError, match=r"model is missing: there is no .*models/Q5.gguf; `make peers`"):
        command_of("llamacpp:Q5.gguf", tmp_path)
    with pytest.raises(ConfigError, match=r"no peer 'vlm'. Did you mean 'vllm'\?"):
        command_of("vlm", tmp_path)


def test_bench_measures_a_peer_beside_us(fake, tmp_path, model, capsys):
    install(tmp_path, "llamacpp", "BF16.gguf", fake)
    more = ("--workload", "decode1", "--repeat", "2", "--peer", "llamacpp", "--peers", str(tmp_path), "--json")
    ours = ("-o", "engine.dtype=float32", "-o", "engine.threads=1", "-o", "cache.memory=64MiB")
    assert run(["bench", "-m", model, *ours, *more]) == 0
    ours, theirs = json.loads(capsys.readouterr().out)
    assert (ours["engine"], theirs["engine"]) == ("intarsia", "llamacpp")
    assert len(theirs["seconds"]) == 2
    assert "bound_tokens_per_s" in ours and "bound_tokens_per_s" not in theirs
    assert theirs["ratio"] == pytest.approx(theirs["tokens_per_s"] / ours["tokens_per_s"], rel=0.01)


def test_a_peer_that_is_not_installed_is_told_before_anything_loads(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("INTARSIA_PEERS", str(tmp_path))
    assert run(["bench", "-m", "no-such-model", "--peer", "openvino"]) == 2
    captured = capsys.readouterr()
    assert "`make peers`" in captured.err and len(captured.err.splitlines()) == 1


# --- the scripts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_every_peer_has_a_script_that_keeps_stdout_for_the_protocol(name):
    tree = ast.parse((SCRIPTS / f"run_{name}.py").read_text())
    calls = [ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    assert calls.index("workloads.own_stdout") < calls.index("workloads.serve")


def test_the_scripts_import_nothing_of_ours_but_the_workloads():
    for path in SCRIPTS.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [name for name in names if name.startswith("intarsia")], path.name


def test_the_workloads_need_the_standard_library_alone():
    run_alone = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(SCRIPTS)!r}); import workloads"],
        capture_output=True,
        text=True,
        check=False,
        env={key: value for key, value in os.environ.items() if not key.startswith("PYTHON")},
    )
    assert run_alone.returncode == 0, run_alone.stderr


def test_setup_names_the_peers_that_bench_knows_and_refuses_others(tmp_path):
    text = (SCRIPTS / "setup.sh").read_text()
    for name in MODELS:
        assert f"make_{name}()" in text
    assert subprocess.run(["bash", "-n", SCRIPTS / "setup.sh"], check=False).returncode == 0
    assert os.access(SCRIPTS / "setup.sh", os.X_OK)
    refused = subprocess.run(
        [SCRIPTS / "setup.sh", tmp_path / "peers", "vlm"], capture_output=True, text=True, check=False
    )
    assert refused.returncode == 2 and "no peer 'vlm'" in refused.stderr
    assert not (tmp_path / "peers").exists()
    assert "contrib/intarsia_bench/peers/setup.sh" in (ROOT / "Makefile").read_text()


def test_the_protocol_ends_with_stdin(fake):
    asked = '{"workload": "prefix", "repeat": 0}\n'
    ran = subprocess.run(
        [sys.executable, fake],
        input=asked,
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    ready, answer = map(json.loads, ran.stdout.splitlines())
    assert ready == {"ready": True}
    assert answer["seconds"] >= 0
    assert set(workloads.ALL) == {"decode1", "prefill", "decode16", "mixed", "prefix"}
