"""The command line as a process: signals, pipes, terminals, and the demo."""

import os
import pty
import re
import select
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from models import tiny_llama

ROOT = Path(__file__).parents[2]
MAIN = [sys.executable, "-c", "from intarsia.cli import main; main()"]
CONFIG = ["-o", "engine.dtype=float32", "-o", "engine.threads=1", "-o", "cache.memory=64MiB"]
#: Enough tokens to be interrupted on any machine.
LONG = ["--ignore-eos", "--temperature", "0"]
PATIENCE_S = 60

# A module that a command imports before all else that is slow, and that tells when it is there.
SLOW_IMPORT = (
    "import pathlib, time; pathlib.Path({marker!r}).touch(); time.sleep({seconds}); raise ImportError('broken off')"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_llama(
        tmp_path_factory.mktemp("model"), hidden=16, heads=2, kv_heads=1, layers=1, ffn=16, max_len=100_000
    )[0]


def start(*args, **options):
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([*MAIN, *map(str, args)], **pipes | options)


def finish(process):
    out, err = process.communicate(timeout=PATIENCE_S)
    return process.returncode, out.decode(), err.decode()


# --- signals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_an_answer_quietly(model, number, code):
    process = start("generate", "-m", model, *CONFIG, *LONG, "Hello")
    assert process.stdout.read(1)
    process.send_signal(number)
    returncode, _, err = finish(process)
    assert (returncode, err) == (code, "")


@pytest.mark.parametrize(("name", "seconds"), [("torch", 1), ("cli_slow_plugin", 30)])
def test_ctrl_c_while_something_is_imported_ends_quietly(tmp_path, name, seconds):
    marker = tmp_path / "importing"
    (tmp_path / f"{name}.py").write_text(SLOW_IMPORT.format(marker=str(marker), seconds=seconds))
    info = tmp_path / "fake_slow-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fake-slow\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[intarsia]\nslow = {name}\n")
    command = ["plugins"] if name != "torch" else ["generate", "-m", "smollm2", "x"]
    process = start(*command, env=os.environ | {"PYTHONPATH": str(tmp_path)})
    begun = time.monotonic()
    while not marker.exists():
        assert time.monotonic() < begun + PATIENCE_S
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert finish(process) == (130, "", "")
    assert time.monotonic() < begun + 25


# --- pipes ------------------------------------------------------------------------------------------------------------


def test_a_reader_that_goes_away_ends_the_answer_quietly(model):
    process = start("generate", "-m", model, *CONFIG, *LONG, "Hello")
    assert process.stdout.read(1)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(PATIENCE_S) == 141


def test_a_full_disk_is_one_message(model):
    with Path("/dev/full").open("w") as full:
        process = start("generate", "-m", model, *CONFIG, "--max-tokens", 4, "Hello", stdout=full)
        err = process.communicate(timeout=PATIENCE_S)[1].decode()
    assert process.returncode == 1
    assert err == "intarsia: error: No space left on device\n"


def test_text_comes_as_it_is_made(model):
    process = start("generate", "-m", model, *CONFIG, *LONG, "Hello")
    assert process.stdout.read(1)
    assert process.poll() is None, "the first character came before the answer was over"
    process.kill()
    process.communicate()


def test_closed_streams_do_no_harm(model):
    command = shlex.join([*MAIN, "generate", "-m", str(model), *CONFIG, "--max-tokens", "2", "Hello"])
    assert subprocess.run(["sh", "-c", f"{command} <&- >&-"], capture_output=True, timeout=PATIENCE_S).stderr == b""
    done = subprocess.run(["sh", "-c", f"{shlex.join(MAIN)} generate -c none.toml x 2>&-"], capture_output=True)
    assert (done.returncode, done.stdout) == (2, b"")
    talk = shlex.join([*MAIN, "chat", "-m", str(model), *CONFIG])
    done = subprocess.run(["sh", "-c", f"{talk} <&-"], capture_output=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stderr) == (0, b"")


# --- a terminal -------------------------------------------------------------------------------------------------------


class Terminal:
    """A process on a terminal of its own, and what it wrote there."""

    def __init__(self, *args):
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.environ["TERM"] = "xterm"
            os.execv(sys.executable, [*MAIN, *map(str, args)])
        self.seen = ""

    def expect(self, pattern):
        """Wait until this comes after all that was expected before."""
        end = time.monotonic() + PATIENCE_S
        while not (found := re.search(pattern, self.seen)):
            assert time.monotonic() < end, self.seen
            if select.select([self.fd], [], [], 0.1)[0]:
                try:
                    self.seen += os.read(self.fd, 65536).decode(errors="replace")
                except OSError:  # it ended, and that is how a terminal says so
                    assert re.search(pattern, self.seen), self.seen
        before, self.seen = self.seen[: found.start()], self.seen[found.end() :]
        return before

    def send(self, text):
        os.write(self.fd, text.encode())

    def close(self, again=""):
        """Wait for the end; return the exit code and what was left. `again` is sent where nothing happens for long."""
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            if not select.select([self.fd], [], [], 5)[0]:
                self.send(again)
                continue
            try:
                self.seen += os.read(self.fd, 65536).decode(errors="replace")
            except OSError:
                break
        else:
            os.kill(self.pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        os.close(self.fd)
        return code, self.seen


def test_chat_at_a_terminal_stops_an_answer_and_ends_by_ctrl_d(model):
    terminal = Terminal("chat", "-m", model, *CONFIG, "--temperature", 0)
    terminal.expect("> ")
    terminal.send("Hi\r")
    terminal.expect("Hi\r\n.")
    terminal.send("\3")
    terminal.expect(r"\(stopped\)")
    terminal.expect("> ")
    terminal.send("/reset\r")
    terminal.expect("forgotten")
    terminal.expect("> ")
    terminal.send("\4")
    code, rest = terminal.close()
    assert code == 0
    assert "Traceback" not in rest


def test_ctrl_c_at_the_chats_prompt_ends_it(model):
    terminal = Terminal("chat", "-m", model, *CONFIG)
    terminal.expect("> ")
    terminal.send("\3")
    # A signal between readline's prompt and its wait for a key is noticed at the next key only.
    code, rest = terminal.close(again="\3")
    assert code == 130
    assert "Traceback" not in rest
    assert rest.endswith("\n")


def test_a_terminal_sees_progress_and_its_cursor_comes_back(model):
    terminal = Terminal("generate", "-m", model, *CONFIG, "--max-tokens", 4, "Hello")
    code, seen = terminal.close()
    assert code == 0
    assert "starting" in seen
    assert seen.rindex("\x1b[?25h") > seen.rindex("\x1b[?25l")


# --- the demo ---------------------------------------------------------------------------------------------------------


def demo_command():
    (line,) = re.findall(r"^demo:.*\n\t\$\(BIN\)/intarsia (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return shlex.split(line)


def test_the_demo_streams_an_answer_and_closes_with_figures_and_parts():
    process = start(*demo_command())
    code, out, err = finish(process)
    assert code == 0
    assert "Paris" in out
    assert out.endswith("\n")
    figures, parts = err.splitlines()
    assert re.fullmatch(r"\d+ tokens after a prompt of 37, first token in \d+\.\d{3} s, then \d+\.\d tokens/s", figures)
    assert "loader=gguf" in parts
