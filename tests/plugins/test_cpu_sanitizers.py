"""The kernels' C++ harnesses (`tests/native`), built with the address and undefined-behaviour sanitizers."""

import subprocess
from pathlib import Path

import pytest

from intarsia_cpu import build

HARNESSES = sorted((Path(__file__).parents[1] / "native").glob("*.cpp"))
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-O1", "-g", "-Wall", "-Wextra")
# Not every part is used in every harness; g++ 12 warns of its own AVX-512 headers.
QUIET = ("-Werror", "-Wno-unused-function", "-Wno-maybe-uninitialized", "-Wno-uninitialized", "-Wno-psabi")


@pytest.fixture(scope="module", params=build.supported())
def command(request):
    flags = ["-std=c++17", "-fopenmp", "-ffp-contract=off", *SANITIZERS, *QUIET, *build.PATHS[request.param].flags]
    return [build.compiler(), *flags, "-I", str(build.SOURCES)]


@pytest.fixture(scope="module")
def objects(tmp_path_factory, command):
    """The kernels themselves, compiled once a path."""
    folder = tmp_path_factory.mktemp("objects")
    return [compiled(command, source, folder) for source in build.sources()]


def compiled(command, source, folder):
    made = folder / f"{source.stem}.o"
    subprocess.run([*command, "-c", str(source), "-o", str(made)], check=True)
    return str(made)


@pytest.mark.slow
@pytest.mark.parametrize("harness", HARNESSES, ids=lambda file: file.stem)
def test_kernels_stay_within_their_memory_and_the_language(tmp_path, harness, command, objects):
    program = tmp_path / harness.stem
    subprocess.run([*command, str(harness), *objects, "-o", str(program)], check=True)
    ran = subprocess.run([program], capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stdout + ran.stderr
