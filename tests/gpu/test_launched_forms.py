"""What runs on the device is what was compiled ahead of time, form by form."""

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from attrs import evolve

pytestmark = pytest.mark.gpu

#: Runs engines in a process that has compiled nothing yet.
RUN = """
import json, sys, pathlib
from attrs import asdict
from gpu.launched import watched
from gpu.test_engines import OURS, engine_of, greedy, prompts
from intarsia.testing.tiny import save_tiny_model
model = save_tiny_model(pathlib.Path(sys.argv[1]))
with watched() as found:
    for dtype in ("bfloat16", "float32"):
        with engine_of(model, dtype, **OURS) as engine:
            engine.generate(prompts((3, 70, 1, 16)), greedy(8))
print(json.dumps([{**asdict(one), "aligned": sorted(one.aligned)} for one in found]))
"""


@pytest.fixture(scope="module")
def forms(tmp_path_factory):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if importlib.util.find_spec("intarsia_flash") is None or importlib.util.find_spec("intarsia_cuda") is None:
        pytest.skip("flash or cuda is not installed")
    if os.environ.get("TRITON_INTERPRET") != "0":
        pytest.skip("kernels run in Triton's interpreter here")
    from gpu.launched import Launched, listed

    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root / "tests"), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", RUN, str(tmp_path_factory.mktemp("model") / "tiny")]
    run = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    seen = [
        Launched(
            **one
            | {"aligned": frozenset(one["aligned"])}
            | {key: tuple(map(tuple, one[key])) for key in ("types", "constants")}
        )
        for one in json.loads(run.stdout.splitlines()[-1])
    ]
    modules = [importlib.import_module(name) for name in ("intarsia_flash.kernels", "intarsia_cuda.kernels")]
    return seen, [listed(form) for module in modules for form in module.specialisations()]


def test_every_form_that_engines_launch_is_listed(forms):
    seen, known = forms
    assert seen
    plain = [evolve(one, aligned=frozenset()) for one in known]
    assert [one for one in seen if evolve(one, aligned=frozenset()) not in plain] == []


def test_arguments_are_as_aligned_as_those_that_were_compiled(forms):
    seen, known = forms
    assert [one for one in seen if one not in known] == []
