"""Ranks as processes: what they run, how they meet, and where they listen."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engines import engine_of
from intarsia import SamplingParams
from intarsia.errors import ConfigError, ExecutionError
from intarsia_parallel.rank import command_of
from intarsia_parallel.ranks import how_ended, spawn
from intarsia_parallel.rendezvous import is_launched, join_meeting, open_meeting
from models import tiny_llama
from ranks import ENGINE, mixed, parallel, pids
from tools.two_hosts import why_not

ARGS = ("--token-ids", "1,2,3,4,5", "--temperature", "0", "--max-tokens", "12", "--json")
TOOL = Path(__file__).parent.parent / "tools" / "two_hosts.py"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("model"), layers=5)[0]


@pytest.fixture(scope="module")
def wanted(model):
    with engine_of(model, **mixed()) as engine:
        return list(engine.generate([1, 2, 3, 4, 5], SamplingParams(temperature=0, max_tokens=12))[0].token_ids)


def overrides(**executor):
    options = {
        "engine.dtype": "float32",
        "engine.threads": 1,
        "engine.max_model_len": ENGINE["max_model_len"],
        "engine.plugins.block": '["cpu"]',
        "cache.memory": "8MiB",
        "executor.use": "parallel",
        **{f"executor.{name}": value for name, value in executor.items()},
    }
    return [text for name, value in options.items() for text in ("-o", f"{name}={value}")]


def test_torchrun_s_first_rank_runs_the_command_and_the_others_follow():
    args = ["serve", "-c", "engine.toml"]
    assert command_of(args, {"RANK": "0"}) == args == command_of(args, {})
    assert command_of(args, {"RANK": "1"}) == command_of(args, {"RANK": "10"}) == ["follow"]


@pytest.mark.parametrize(
    ("environment", "launched"),
    [({}, False), ({"RANK": "0", "WORLD_SIZE": "1"}, False), ({"RANK": "0", "WORLD_SIZE": "2"}, True)],
)
def test_whoever_sets_torchrun_s_variables_has_started_the_ranks(environment, launched):
    assert is_launched(environment) is launched


def test_another_number_of_ranks_than_the_config_asks_for_is_refused():
    with pytest.raises(ConfigError, match=r"tp x pp is 4, and 2 ranks were started; start 4"):
        join_meeting(4, 1.0, {"RANK": "0", "WORLD_SIZE": "2"})
    with pytest.raises(ConfigError, match="RANK: the environment has 'one'"):
        join_meeting(2, 1.0, {"RANK": "one", "WORLD_SIZE": "2"})


def test_a_store_with_nobody_in_it_is_an_error_after_its_time():
    meeting, server = open_meeting(2, 1.0)
    with pytest.raises(ExecutionError, match="rank 0 does not say how to reach it"):
        meeting.control()
    meeting.announce(host="127.0.0.1", port=5, token=b"\x00\xff")
    assert meeting.control() == {"host": "127.0.0.1", "port": 5, "token": b"\x00\xff"}
    del server


def test_ends_of_processes_are_said_in_words():
    assert how_ended(-9) == "was killed by SIGKILL"
    assert how_ended(3) == "ended with exit code 3"
    assert how_ended(-200) == "was killed by signal 200"


def test_follow_by_itself_says_how_ranks_are_started():
    clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run([sys.executable, "-m", "intarsia", "follow"], capture_output=True, text=True, env=clean)
    assert done.returncode == 2 and "torchrun --nproc-per-node 2 -m intarsia_parallel.rank" in done.stderr


def test_a_rank_ends_where_nobody_waits_for_it():
    """Its parent is this process, but nobody is at the store's port."""
    process = spawn(1, 2, 9)
    process.kill()
    assert process.wait(10) == -9


def listening(pid):
    """Return the addresses that a process listens on, as the kernel writes them."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = str(descriptor.readlink())
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.append(fields[1].rpartition(":")[0])
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ranks_of_one_machine_listen_on_loopback_alone(model, wanted):
    before = listening(os.getpid())
    with parallel(model, pp=2) as engine:
        ids = engine.generate([1, 2, 3, 4, 5], SamplingParams(temperature=0, max_tokens=12))[0].token_ids
        own, theirs = listening(os.getpid()), listening(pids(engine)[1])
        command = Path(f"/proc/{pids(engine)[1]}/cmdline").read_bytes().split(b"\0")
    assert list(ids) == wanted
    for address in before:
        own.remove(address)
    assert own and theirs, "the store, the links and gloo listen"
    assert set(own) | set(theirs) <= {
        "0100007F",
        "00000000000000000000000001000000",
        "0000000000000000FFFF00000100007F",
    }
    assert command[-2] == b"follow"


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "pp"), [(1, 2), (2, 1), (2, 2)])
def test_torchrun_starts_the_ranks_of_one_machine(model, wanted, tp, pp):
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(tp * pp)),
            *("-m", "intarsia_parallel.rank", "generate", "-m", str(model), *ARGS, *overrides(tp=tp, pp=pp)),
        ],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["token_ids"] == wanted


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "pp"), [(1, 2), (2, 1), (2, 2)])
def test_two_hosts_answer_as_one_process(model, wanted, tp, pp):
    if reason := why_not():
        pytest.skip(reason)
    command = [sys.executable, str(TOOL), str(model), str(tp), str(pp)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["token_ids"] == wanted
