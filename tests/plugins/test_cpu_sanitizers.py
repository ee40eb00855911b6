"""The kernels' C++ harnesses (`tests/native`), built with the address and undefined-behaviour sanitizers."""

import subprocess
from pathlib import Path

import pytest

from intarsia_cpu import build

HARNESSES = sorted((Path(__file__).parents[1] / "native").glob("*.cpp"))
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-O1", "-g", "-Wall", "-Wextra")
# Not every part is used in every harness; g++ 12 warns of its own AVX-512 headers.
QUIET = ("-Werror", "-Wno-unused-function", "-Wno-maybe-uninitialized", "-Wno-uninitialized", "-Wno-psabi")


@pytest.mark.slow
@pytest.mark.parametrize("path", build.supported())
@pytest.mark.parametrize("harness", HARNESSES, ids=lambda file: file.stem)
def test_kernels_stay_within_their_memory_and_the_language(tmp_path, harness, path):
    program = tmp_path / harness.stem
    flags = ["-std=c++17", "-fopenmp", "-ffp-contract=off", *SANITIZERS, *QUIET, *build.PATHS[path].flags]
    command = [build.compiler(), *flags, "-I", str(build.SOURCES), str(harness), "-o", str(program)]
    subprocess.run(command, check=True)
    ran = subprocess.run([program], capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stdout + ran.stderr
