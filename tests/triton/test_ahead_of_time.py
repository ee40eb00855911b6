"""Every form of every kernel compiles for sm_80, sm_90 and sm_100, spills nothing, and takes what is recorded."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ahead_of_time_forms
from intarsia.gpu_kernels import CAPABILITIES, SHARED_LIMITS, Resources, Specialisation, faults, table

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "docs/gpu_kernels.py"
RECORDED = ROOT / "docs/gpu-kernels.json"
#: Forms that all plugins together may have; each is compiled for up to three architectures, in under a second.
BUDGET = 120

spec = importlib.util.spec_from_file_location("gpu_kernels_script", SCRIPT)
script = importlib.util.module_from_spec(spec)
sys.modules["gpu_kernels_script"] = script
spec.loader.exec_module(script)


def without_interpreter(*command):
    """Run Python where kernels are compiled, with the suite's modules."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT / "tests")}
    return subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, check=False, timeout=900
    )


def run_script(*arguments):
    return without_interpreter(SCRIPT, *arguments)


# --- one form ---------------------------------------------------------------------------------------------------------

#: Compiles the test's own forms and says what they take, and what ptxas itself says of the same PTX.
COMPILE = """
import json, re, subprocess, sys, tempfile
import triton
from attrs import astuple
from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability
import ahead_of_time_forms
from intarsia import gpu_kernels
kept = []
compile_triton = triton.compile
def keep(*args, **kwargs):
    kept.append(compile_triton(*args, **kwargs))
    return kept[-1]
triton.compile = keep
found = []
for form in ahead_of_time_forms.specialisations():
    for capability in form.capabilities:
        taken = gpu_kernels.compile_for(form, capability)
        with tempfile.TemporaryDirectory() as folder:
            with open(folder + "/kernel.ptx", "w") as file:
                file.write(kept[-1].asm["ptx"])
            said = subprocess.run(
                [get_ptxas(capability).path, "-v", "-lineinfo",
                 f"--gpu-name={sm_arch_from_capability(capability)}", folder + "/kernel.ptx", "-o", folder + "/out"],
                capture_output=True, text=True, check=True).stderr
        found.append([form.name, capability, astuple(taken), said])
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def compiled():
    run = without_interpreter("-c", COMPILE)
    assert run.returncode == 0, run.stderr
    return {(name, capability): (Resources(*taken), said) for name, capability, taken, said in json.loads(run.stdout)}


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_a_plain_kernel_compiles_for_each_architecture_and_nothing_is_wrong_with_it(compiled, capability):
    taken, _ = compiled["scale[bf16]", capability]
    assert 0 < taken.registers <= 255
    assert (taken.spills, taken.shared, faults(capability, taken)) == (0, 0, ())


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_a_kernel_that_keeps_more_than_its_registers_hold_is_at_fault(compiled, capability):
    taken, said = compiled["centre", capability]
    assert int(re.search(r"(\d+) bytes spill stores", said)[1]) > 0, "ptxas says that it spills"
    assert faults(capability, taken)[0] == f"spills {taken.spills} bytes a thread"


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_a_kernel_that_takes_more_shared_memory_than_a_block_has_is_at_fault(compiled, capability):
    taken, _ = compiled["product", capability]
    assert taken.shared > SHARED_LIMITS[capability]
    (fault,) = [line for line in faults(capability, taken) if "shared" in line]
    assert str(SHARED_LIMITS[capability]) in fault and str(taken.shared) in fault


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_registers_and_local_memory_are_what_ptxas_says(compiled, capability):
    for name in ("scale[bf16]", "centre"):
        taken, said = compiled[name, capability]
        # Of a compilation without some options that Triton gives ptxas: where registers are short, they change much.
        registers, stack = (int(re.search(p, said)[1]) for p in (r"Used (\d+) registers", r"(\d+) bytes stack frame"))
        assert name == "centre" or abs(taken.registers - registers) <= 4
        assert (taken.spills > 0) == (stack > 0)


def test_the_limits_of_shared_memory_are_those_of_the_programming_guide():
    assert SHARED_LIMITS == {80: 166912, 90: 232448, 100: 232448}


def test_tensor_memory_beyond_what_a_multiprocessor_has_is_a_fault():
    assert faults(100, Resources(32, 0, 0, tensor_memory=512)) == ()
    assert "513 columns of tensor memory" in faults(100, Resources(32, 0, 0, tensor_memory=513))[0]


# --- launching --------------------------------------------------------------------------------------------------------


def test_a_launch_runs_the_form_that_is_compiled():
    x = torch.randn(300, generator=torch.Generator().manual_seed(0)).bfloat16()
    out = torch.full((300,), torch.nan)
    ahead_of_time_forms.plain().launch((2,), x, out, 3.0, 300)
    torch.testing.assert_close(out, x.float() * 3, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("x", "factor", "width", "name"),
    [
        (torch.zeros(4), 3.0, 4, "x"),
        (torch.zeros(4, dtype=torch.float16), 3.0, 4, "x"),
        (torch.zeros(4).bfloat16(), 3, 4, "factor"),
        (torch.zeros(4).bfloat16(), 3.0, 4.0, "width"),
        (torch.zeros(4).bfloat16(), 3.0, 2**31, "width"),
        (torch.zeros(4).bfloat16(), 3.0, None, "width"),
    ],
)
def test_a_launch_with_other_types_than_those_that_are_compiled_is_caught(x, factor, width, name):
    with pytest.raises(AssertionError, match=rf"scale\[bf16\]: {name} is"):
        ahead_of_time_forms.plain().launch((1,), x, torch.zeros(4), factor, width)


def test_a_launch_with_an_argument_too_few_is_caught():
    with pytest.raises(ValueError, match="shorter"):
        ahead_of_time_forms.plain().launch((1,), torch.zeros(4).bfloat16(), torch.zeros(4), 3.0)


def test_two_forms_of_one_name_are_caught():
    with pytest.raises(AssertionError, match=r"two forms are named scale\[bf16\]"):
        table([ahead_of_time_forms.plain()] * 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"constants": {}}, r"\['BLOCK'\]"),
        ({"constants": {"BLOCK": 256, "WARPS": 4}}, r"\['WARPS'\]"),
        ({"aligned": ("x", "y")}, "aligned|not all in its signature"),
    ],
)
def test_a_form_that_does_not_match_its_kernel_does_not_compile(changes, message):
    plain = ahead_of_time_forms.plain()
    facts = {"name": plain.name, "signature": dict(plain.signature), "constants": dict(plain.constants)} | changes
    code = (
        "import ahead_of_time_forms as forms; from intarsia.gpu_kernels import Specialisation, compile_for;"
        f"compile_for(Specialisation(kernel=forms.scale, **{facts!r}), 90)"
    )
    run = without_interpreter("-c", code)
    assert run.returncode == 1 and re.search(message, run.stderr), run.stderr


def test_a_kernel_made_for_the_interpreter_is_not_compiled():
    from intarsia.gpu_kernels import compile_for

    with pytest.raises(AssertionError, match="unset TRITON_INTERPRET"):
        compile_for(ahead_of_time_forms.plain(), 90)


# --- the script and the file ------------------------------------------------------------------------------------------


def test_the_script_records_what_it_finds_and_then_finds_the_same(tmp_path):
    path = tmp_path / "found.json"
    written = run_script("--module", "fine_forms", "--path", path)
    assert written.returncode == 0, written.stderr
    ((_, modules),) = json.loads(path.read_text())["triton"].items()
    numbers = modules["fine_forms"]["scale[bf16]"]
    assert set(numbers) == {"80", "90", "100"}
    assert run_script("--module", "fine_forms", "--path", path, "--check").returncode == 0

    changed = path.read_text().replace(json.dumps(numbers["90"]), json.dumps([9, *numbers["90"][1:]]))
    path.write_text(changed)
    checked = run_script("--module", "fine_forms", "--path", path, "--check")
    assert checked.returncode == 1
    assert f"scale[bf16] for sm_90: {numbers['90']}, recorded [9" in checked.stderr
    assert path.read_text() == changed


def test_forms_that_spill_or_take_too_much_fail_the_script(tmp_path):
    run = run_script("--module", "ahead_of_time_forms", "--path", tmp_path / "found.json")
    assert run.returncode == 1
    assert "centre for sm_90: spills" in run.stderr and "product for sm_80: takes" in run.stderr
    assert "scale" not in run.stderr


def test_a_version_that_is_not_recorded_is_compared_with_nothing(tmp_path):
    path = tmp_path / "found.json"
    path.write_text(script.text({"3.6.0": {"fine_forms": {"gone": {"80": [1, 0, 0, 0]}}}}))
    run = run_script("--module", "fine_forms", "--path", path, "--check")
    assert run.returncode == 0 and "is not recorded" in run.stdout
    assert run_script("--module", "fine_forms", "--path", path).returncode == 0
    assert "3.6.0" in json.loads(path.read_text())["triton"], "the other version stays"


def test_a_form_that_is_gone_is_a_difference():
    recorded = {"m": {"a": {"80": [1, 0, 0, 0]}, "b": {"80": [2, 0, 0, 0]}}}
    found = {"m": {"a": {"80": [1, 0, 0, 0]}}}
    assert script.differences(recorded, found, whole=True) == ["m: b is recorded, and is no form any more"]
    assert script.differences(recorded, found, whole=False) == []


def test_the_file_is_json_with_a_line_a_form():
    found = {"m": {"a": {"80": [1, 0, 0, 0]}, "b": {"80": [2, 0, 0, 0]}}, "n": {}}
    written = script.text({"3.9.0": found, "3.6.0": found})
    assert json.loads(written) == {"columns": script.COLUMNS, "triton": {"3.6.0": found, "3.9.0": found}}
    assert '    "a": {"80": [1, 0, 0, 0]},\n' in written


# --- the plugins' kernels ---------------------------------------------------------------------------------------------


def all_tasks():
    return [task for module in script.MODULES for task in script.tasks(module)]


def test_the_plugins_have_no_more_forms_than_there_is_time_to_compile():
    assert len({(task.module, task.name) for task in all_tasks()}) <= BUDGET


def test_every_plugin_with_triton_kernels_is_compiled():
    """A plugin whose code decorates a kernel has its forms listed by the script."""
    having = {
        path.relative_to(ROOT / "plugins").parts[0]
        for path in (ROOT / "plugins").rglob("*.py")
        if re.search(r"^\s*@triton\.jit", path.read_text(), flags=re.MULTILINE)
    }
    listed = {task.module.split(".")[0] for task in all_tasks()}
    assert having <= listed, f"without forms in {script.MODULES}: {having - listed}"


@pytest.mark.parametrize("module", script.MODULES)
def test_every_form_names_each_argument_of_its_kernel_once(module):
    if not script.tasks(module):
        pytest.skip(f"{module} is not there")
    for form in importlib.import_module(module).specialisations():
        assert isinstance(form, Specialisation)
        typed, constant = set(form.signature), set(form.constants)
        assert not typed & constant, form.name
        assert typed | constant <= set(form.kernel.arg_names), form.name
        assert set(form.aligned) <= typed, form.name
        assert set(form.capabilities) <= set(CAPABILITIES), form.name


def test_the_first_forms_of_the_plugins_compile_and_take_what_is_recorded():
    run = run_script("--check", "--first", "2")
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_form_compiles_for_every_architecture_without_spills_and_takes_what_is_recorded():
    run = run_script("--check")
    assert run.returncode == 0, run.stdout + run.stderr
