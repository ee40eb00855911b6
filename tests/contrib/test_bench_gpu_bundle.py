"""The bundle for a GPU machine: what goes in, what is installed there from it, and who is refused."""

import base64
import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.version import Version

from intarsia.errors import ConfigError
from intarsia_bench.gpu import bootstrap, bundle

ROOT = Path(__file__).parents[2]
OURS = f"{sys.version_info.major}.{sys.version_info.minor}"


def make_wheel(folder, name, version, requires=(), code="x = 1\n"):
    """Write a wheel of one module, by hand."""
    info = f"{name}-{version}.dist-info"
    metadata = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}", *(f"Requires-Dist: {r}" for r in requires)]
    files = {
        f"{name}.py": code,
        f"{info}/METADATA": "\n".join(metadata) + "\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    lines = []
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        lines.append(f"{path},sha256={digest},{len(text.encode())}")
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name_, text in files.items():
            archive.writestr(name_, text)
        archive.writestr(f"{info}/RECORD", "\n".join([*lines, f"{info}/RECORD,,"]) + "\n")
    return path


# --- making -----------------------------------------------------------------------------------------------------------


def test_what_we_need_there_is_found_with_the_oldest_versions_that_do():
    found = bundle.closure(bundle.target("3.12"))
    needed = {"attrs", "pluggy", "click", "jinja2", "markupsafe", "msgpack", "pyzmq", "rich", "tokenizers"}
    needed |= {"safetensors", "gguf", "psutil", "cuda-core", "cuda-bindings", "pytest", "hypothesis"}
    assert needed <= found.keys()
    assert not {"torch", "triton", "ruff", "mypy", "intarsia", "transformers"} & found.keys()
    assert found["attrs"][1] >= Version("24.2") and Version(found["attrs"][0]) >= found["attrs"][1]


def test_markers_are_those_of_the_machine():
    there = bundle.target("3.12")
    texts = [
        "a>=1; python_version < '3.12'",
        "b; sys_platform == 'win32'",
        "c; extra == 'dev'",
        "d; python_version >= '3.12'",
    ]
    assert [r.name for r in bundle.needed([*texts, "torch>=2", "Triton"], there)] == ["d"]


def test_a_wheel_that_is_missing_or_too_old_makes_a_bundle_incomplete(tmp_path):
    ours = make_wheel(tmp_path, "ours", "1.0", ["torch>=2.10", "there>=1", "old-one>=2,<3", "gone", "no; extra == 'x'"])
    wheels = [ours, make_wheel(tmp_path, "there", "1.5"), make_wheel(tmp_path, "old_one", "1.9")]
    lines = bundle.missing(wheels, bundle.target("3.12"))
    assert len(lines) == 2
    assert "old-one<3,>=2; the bundle has 1.9" in lines[0] and "gone; the bundle has None" in lines[1]


def test_a_bundle_that_is_too_large_names_its_largest_wheels(tmp_path):
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels/big.whl").write_bytes(b"x" * 2000)
    (tmp_path / "wheels/small.whl").write_bytes(b"x" * 10)
    bundle.check_size(tmp_path, limit=2010)
    with pytest.raises(ConfigError, match=r"more than 0; the largest: big\.whl"):
        bundle.check_size(tmp_path, limit=2009)


def test_the_tests_that_go_along_run_without_the_checkout_and_are_skipped_where_there_is_no_gpu(tmp_path):
    bundle.copy_tests(ROOT, tmp_path)
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-m", "gpu", "-q", "-p", "no:cacheprovider", "--color=no"]
    environment = {**os.environ, "TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-2000:]
    assert "no CUDA device" in run.stdout and "passed" not in run.stdout.splitlines()[-1]
    skipped = int(run.stdout.splitlines()[-1].split(" skipped")[0].split()[-1])
    assert skipped > 50, run.stdout.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_bundle_is_complete_small_and_what_the_manifest_says(tmp_path):
    folder = tmp_path / "bundle"
    try:
        entries = bundle.make(ROOT, folder, "3.12")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"pip reaches no index: {error}")
    assert bundle.size_of(folder) <= 60_000_000
    files = {path.name for path in (folder / "wheels").iterdir()}
    assert files == {entry["file"] for entry in entries}
    assert bundle.missing(sorted((folder / "wheels").glob("*.whl")), bundle.target("3.12")) == []
    binary = [name for name in files if not name.endswith("-any.whl")]
    assert binary and all(name.endswith("x86_64.whl") and ("cp312" in name or "abi3" in name) for name in binary)
    assert (folder / "check.py").read_text() == (ROOT / "contrib/intarsia_bench/gpu/bootstrap.py").read_text()
    environment = tmp_path / "environment"
    there = shutil.which("python3.12")
    if there is None or subprocess.run([there, "--version"], capture_output=True, check=False).returncode:
        # The wheels that any Python can have.
        wheels = [str(folder / "wheels" / name) for name in sorted(files) if name.endswith("-none-any.whl")]
        code = "import attrs, click, intarsia_bench.gpu, pluggy"
        there = sys.executable
    else:
        wheels = [str(path) for path in sorted((folder / "wheels").iterdir())]
        code = "import attrs, gguf, hypothesis, intarsia_bench.gpu, msgpack, numpy, safetensors, tokenizers, zmq"
    subprocess.run([there, "-m", "venv", "--without-pip", str(environment)], check=True)
    pip = [sys.executable, "-m", "pip", "--python", str(environment / "bin/python")]
    subprocess.run([*pip, "install", "-qq", "--no-index", "--no-deps", *wheels], check=True)
    code += "; from importlib.metadata import entry_points as e; assert 'cpu' in e(group='intarsia').names"
    subprocess.run([environment / "bin/python", "-c", code], check=True)
    if there != sys.executable:
        run = subprocess.run([*pip, "check"], capture_output=True, text=True, check=False)
        lacking = {line.split(" requires ")[1].split(",")[0] for line in run.stdout.splitlines()}
        assert lacking == {"torch", "triton"}, run.stdout


# --- installing -------------------------------------------------------------------------------------------------------


def test_the_bootstrap_imports_the_standard_library_alone():
    source = (ROOT / "contrib/intarsia_bench/gpu/bootstrap.py").read_text()
    names = {line.split()[1].split(".")[0] for line in source.splitlines() if line.startswith(("import ", "from "))}
    assert names <= sys.stdlib_module_names | {"__future__"}


@pytest.mark.parametrize(
    ("version", "release"), [("2.11.0+cu130", (2, 11, 0)), ("1!3.6", (3, 6)), ("26.0rc1", (26, 0)), ("x", ())]
)
def test_releases_of_versions(version, release):
    assert bootstrap.release(version) == release


def test_wheels_are_installed_where_packages_are_missing_or_too_old_and_ours_always():
    names = {"intarsia": "0.1.0", "here": "1.2", "old": "2.10", "gone": "1.0", "newer": "1.0"}
    wheels = [{"name": name, "minimum": minimum, "file": f"{name}.whl"} for name, minimum in names.items()]
    have = {"intarsia": "0.1.0", "here": "1.2.0", "old": "2.9", "newer": "1.10"}
    assert bootstrap.lacking({"name": "intarsia", "wheels": wheels}, have.get) == [
        "intarsia.whl",
        "old.whl",
        "gone.whl",
    ]


def fake_bundle(folder, python=OURS):
    """Make a bundle of small wheels; ours tells what it was called with, and what it sees."""
    wheels = folder / "wheels"
    wheels.mkdir(parents=True)
    made = [
        make_wheel(wheels, "intarsia_fake", "1.0", code="import sys; print(sys.argv)\n"),
        make_wheel(wheels, "brought_along", "3.0", code="x = 'new'\n"),
        make_wheel(wheels, "attrs", "0.0.1", code="raise SystemExit('the older one hides the one that is here')\n"),
    ]
    entries = [
        {"name": "intarsia-fake", "version": "1.0", "minimum": "1.0", "file": made[0].name},
        {"name": "brought-along", "version": "3.0", "minimum": "2.0", "file": made[1].name},
        {"name": "attrs", "version": "0.0.1", "minimum": "0.0.1", "file": made[2].name},
    ]
    manifest = {"name": "intarsia-fake", "commit": "abc", "python": python, "wheels": entries}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def test_an_environment_sees_the_packages_below_and_gets_what_is_lacking(tmp_path):
    folder = fake_bundle(tmp_path / "bundle")
    python = bootstrap.make_environment(tmp_path / "environment")
    assert bootstrap.install(folder, python) == [
        "intarsia_fake-1.0-py3-none-any.whl",
        "brought_along-3.0-py3-none-any.whl",
    ]
    # torch and attrs are of the Python below, itself an environment here.
    code = "import attrs, brought_along, intarsia_fake, torch; print(brought_along.x, torch.__version__)"
    run = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert run.stdout.splitlines()[-1].startswith("new 2.")


def test_a_bundle_for_another_python_and_what_is_no_bundle_are_refused(tmp_path):
    with pytest.raises(bootstrap.RefusalError, match=r"made for Python 3\.99, and .* is"):
        bootstrap.install(fake_bundle(tmp_path / "bundle", "3.99"), Path(sys.executable))
    with pytest.raises(bootstrap.RefusalError, match="is no bundle: make one with `make gpu-bundle`"):
        bootstrap.install(tmp_path, Path(sys.executable))


def test_without_a_gpu_nothing_is_installed(tmp_path):
    script = ROOT / "contrib/intarsia_bench/gpu/bootstrap.py"
    command = [sys.executable, script, "--bundle", fake_bundle(tmp_path / "bundle"), "--out", tmp_path / "out"]
    run = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert run.returncode == 2
    assert run.stderr.startswith("no CUDA device: torch ") and run.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_python_without_torch_is_named(tmp_path):
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    script = ROOT / "contrib/intarsia_bench/gpu/bootstrap.py"
    run = subprocess.run([bare / "bin/python", script], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert run.returncode == 2
    assert run.stderr.startswith(f"no CUDA device: {bare}/bin/python has no torch")


def test_with_a_gpu_the_check_runs_in_the_environment(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(bootstrap, "find_device", lambda: None)
    # Ours is a package that tells its arguments, in place of the real check.
    folder = tmp_path / "bundle"
    (folder / "wheels").mkdir(parents=True)
    wheel = make_wheel(folder / "wheels", "intarsia_fake", "1.0")
    manifest = {"name": "intarsia-fake", "commit": "abc", "python": OURS, "wheels": []}
    manifest["wheels"].append({"name": "intarsia-fake", "version": "1.0", "minimum": "1.0", "file": wheel.name})
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert bootstrap.main(["--bundle", str(folder), "--out", str(tmp_path / "out")]) == 2
    found = capfd.readouterr()
    assert "installed 1 of 1 wheels" in found.out
    # The real package, of the Python below, is what runs: it finds no device, and says so.
    assert "no CUDA device" in found.err
