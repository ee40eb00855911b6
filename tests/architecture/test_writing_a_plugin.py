"""The tutorial is followed as a new author would: from an empty folder, its edits and its commands in their order."""

import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import attrs
import pytest

from intarsia.config import load_config
from plugin_packages import lay_out, path_of
from serving import eventually
from tutorial import Block, Edit, missing, read

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/writing-a-plugin.md").read_text()
BIN = Path(sys.executable).parent
#: What takes a few seconds each.
QUICK = ("cd ", "pip install", "intarsia plugins new", "intarsia plugins check")
PATIENCE_S = 800


@attrs.define
class Author:
    """Somebody who follows the page.

    Attributes:
        folder: where they are.
        quick: whether they leave out what takes long.
        ran: commands so far.
    """

    folder: Path
    quick: bool
    port: int
    runtime: Path  # a short one: the path of a socket has 107 characters at most
    ran: list[str] = attrs.field(factory=list)
    server: subprocess.Popen | None = None

    def follow(self, page):
        for step in read(page):
            if isinstance(step, Edit):
                step.make(self.folder)
            elif step.language == "sh":
                self.type(step)
            elif step.language == "python" and not self.quick:
                self.check(step, self.call([sys.executable, "-c", step.text]))

    def type(self, block):
        before, said = len(self.ran), []
        for line in block.text.splitlines():
            command, _, comment = (part.strip() for part in line.partition("  #"))
            if self.quick and not (command.startswith(QUICK) or comment == "fails"):
                continue
            self.ran.append(command)
            if command.startswith("cd "):
                self.folder = self.folder / command.removeprefix("cd ")
            elif command.startswith("pip install"):
                lay_out(self.folder)
            elif command.endswith("&"):
                self.serve(command)
            else:
                said.append(self.call(["bash", "-ec", self.shortened(command)], fails=comment == "fails"))
        if len(self.ran) - before == len(block.text.splitlines()):
            self.check(block, "\n".join(said))

    def shortened(self, command):
        """Run the benchmark once, ask the server that is our own, and wheels by what is installed."""
        if command.startswith("intarsia bench"):
            return f"{command} --repeat 1"
        if command.startswith(("intarsia swap", "intarsia explain --live")):
            return f"{command} --address tcp://127.0.0.1:{self.port}"
        if command.startswith("intarsia control"):
            socket = f"ipc://{self.runtime}/intarsia-{self.port}.control"
            return command.replace("control", f"control --control {socket}")
        return command.replace("pip wheel", f"{sys.executable} -m pip wheel --no-build-isolation")

    def check(self, block, said):
        assert missing(block.says, said) == [], f"{block.text}\n{said[-6000:]}"

    @property
    def environ(self):
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
        installed = path_of(self.folder / "src", self.folder / ".installed")
        return kept | {
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": installed,
            "XDG_RUNTIME_DIR": str(self.runtime),
            "COLUMNS": "200",
        }

    def call(self, command, fails=False):
        done = subprocess.run(
            command, cwd=self.folder, env=self.environ, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
        said = done.stdout + done.stderr
        assert (done.returncode != 0) == fails, f"{command}\n{said[-6000:]}"
        return said

    def serve(self, command):
        words = [*shlex.split(command.rstrip("& ")), "--bind", f"tcp://127.0.0.1:{self.port}"]
        log = self.folder / "server.log"
        with log.open("w") as out:
            self.server = subprocess.Popen(words, cwd=self.folder, env=self.environ, stdout=out, stderr=out)
        eventually(lambda: "info: ready" in log.read_text() or self.server.poll() is not None, 120)
        assert self.server.poll() is None, log.read_text()


@pytest.fixture
def author(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as runtime:
        author = Author(tmp_path, True, port, Path(runtime))
        yield author
        if author.server is not None:
            author.server.kill()
            author.server.wait()


def commands():
    blocks = [step for step in read(PAGE) if isinstance(step, Block) and step.language == "sh"]
    return [line for block in blocks for line in block.text.splitlines()]


def test_who_follows_the_page_has_a_scheduler_that_keeps_its_contract(author):
    """All edits are made, the claims that the page says break do, and at the end none does."""
    author.follow(PAGE)
    assert author.ran.count("pytest") == 1
    assert author.ran[-1] == "intarsia plugins check shortest"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_command_of_the_page_does_what_it_says(author):
    author.quick = False
    author.follow(PAGE)
    assert author.server.wait(60) == 0
    assert len(author.ran) == len(commands())
    assert [path.suffix for path in (author.folder / "dist").iterdir()] == [".whl"]


def test_the_configs_and_entry_points_of_the_page_are_some(tmp_path):
    entry, config = (step.text for step in read(PAGE) if isinstance(step, Block) and step.language == "toml")
    assert tomllib.loads(entry)["project"]["entry-points"]["intarsia"] == {"shortest": "intarsia_shortest"}
    (tmp_path / "engine.toml").write_text(config)
    chosen = load_config(tmp_path / "engine.toml").scheduler
    assert (chosen.use, set(chosen.options)) == ("shortest", {"max_batch", "ageing"})


@pytest.mark.parametrize("word", ["becomes:", "comes:", "goes."])
def test_every_edit_of_the_page_is_read(word):
    edits = [step for step in read(PAGE) if isinstance(step, Edit)]
    said = re.findall(rf"^In `.* {re.escape(word)}$", PAGE, flags=re.MULTILINE)
    hows = {"becomes:": {"becomes"}, "comes:": {"before", "after"}, "goes.": {"goes"}}[word]
    assert len(said) == len([edit for edit in edits if edit.how in hows]) > 0


def test_a_page_that_says_otherwise_is_found():
    assert missing("a  b ...\nc", "x\na b of c\n") == ["c"]
    assert missing("2 failed in ...", "22 failed in 3 s") == ["2 failed in ..."]
