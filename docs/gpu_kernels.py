"""Write docs/gpu-kernels.json: what each form of each Triton kernel takes, compiled ahead of time without a GPU.

`python docs/gpu_kernels.py` compiles every form that a plugin can launch for every architecture it is for, and records
registers, spills, shared and tensor memory under the version of Triton that is installed. With `--check` it writes
nothing, and compares. Either way it exits 1 where a form does not compile, spills, or takes more than a block can have.
`make gpu-kernels` writes the file.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import TypeAlias

from attrs import astuple, frozen

PATH = Path(__file__).parent / "gpu-kernels.json"
#: Modules with a `specialisations()` that lists all that their plugin launches.
MODULES = ("intarsia_flash.kernels", "intarsia_cuda.kernels")
#: What the numbers of a form are, in order.
COLUMNS = ["registers a thread", "bytes spilled a thread", "bytes of shared memory a block", "columns of tensor memory"]
#: Two compile as fast as one on two cores, and no more than four use memory at once.
PROCESSES = min(4, os.cpu_count() or 1)

#: module -> form -> capability -> numbers
Found: TypeAlias = dict[str, dict[str, dict[str, list[int]]]]


@frozen
class Task:
    """One compilation."""

    module: str
    name: str
    capability: int

    def __str__(self) -> str:
        return f"{self.module}: {self.name} for sm_{self.capability}"


@frozen
class Outcome:
    """What came of it: numbers, what is wrong with them, or why there are none."""

    task: Task
    numbers: tuple[int, ...] = ()
    faults: tuple[str, ...] = ()


def tasks(module: str) -> list[Task]:
    """List a module's compilations; none where the module is not there."""
    try:
        forms = importlib.import_module(module).specialisations()
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            raise
        return []
    names = [form.name for form in forms]
    assert len(set(names)) == len(names), f"{module}: two forms have one name"
    return [Task(module, form.name, capability) for form in forms for capability in form.capabilities]


def work(task: Task) -> Outcome:
    """Compile one form; in a process of its own."""
    from intarsia.gpu_kernels import compile_for, faults, table

    form = table(importlib.import_module(task.module).specialisations())[task.name]
    try:
        taken = compile_for(form, task.capability)
    except Exception as error:  # whatever Triton's passes and ptxas raise
        lines = str(error).strip().splitlines() or [""]
        return Outcome(task, faults=(f"does not compile: {type(error).__name__}: {lines[0]:.300}",))
    return Outcome(task, astuple(taken), faults(task.capability, taken))


def compiled(chosen: Iterable[Task]) -> Iterator[Outcome]:
    """Compile in a few processes; the outcomes are in order."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(PROCESSES, mp_context=context) as pool:
        yield from pool.map(work, chosen)


def gathered(outcomes: Iterable[Outcome]) -> Found:
    """Return the numbers of all that compiled."""
    found: Found = {}
    for one in outcomes:
        forms = found.setdefault(one.task.module, {})
        if one.numbers:
            forms.setdefault(one.task.name, {})[str(one.task.capability)] = list(one.numbers)
    return found


def differences(recorded: Found, found: Found, *, whole: bool) -> list[str]:
    """Return where numbers differ from those that are recorded, and, of a whole run, what is recorded and gone."""
    lines = []
    for module, forms in found.items():
        for name, capabilities in forms.items():
            before = recorded.get(module, {}).get(name, {})
            for capability, numbers in capabilities.items():
                if before.get(capability) != numbers:
                    lines.append(f"{module}: {name} for sm_{capability}: {numbers}, recorded {before.get(capability)}")
    if whole:
        gone = [(m, n) for m, forms in recorded.items() for n in forms if n not in found.get(m, {})]
        lines += [f"{module}: {name} is recorded, and is no form any more" for module, name in gone]
    return lines


def text(versions: Mapping[str, Found]) -> str:
    """Return the file: a line a form."""
    lines = ["{", f'"columns": {json.dumps(COLUMNS)},', '"triton": {']
    for v, (number, modules) in enumerate(sorted(versions.items())):
        lines.append(f'"{number}": {{')
        for m, (module, forms) in enumerate(sorted(modules.items())):
            lines.append(f'  "{module}": {{')
            entries = [f"    {json.dumps(name)}: {json.dumps(table)}" for name, table in sorted(forms.items())]
            lines.append(",\n".join(entries))
            lines.append("  }" + "," * (m < len(modules) - 1))
        lines.append("}" + "," * (v < len(versions) - 1))
    return "\n".join([*lines, "}", "}"]) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Compile, then write or compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare with the file and write nothing")
    parser.add_argument("--module", action="append", help="of forms, in place of the plugins'")
    parser.add_argument("--first", type=int, help="compile only so many forms of each module, for their first target")
    parser.add_argument("--path", type=Path, default=PATH)
    options = parser.parse_args(arguments)
    os.environ.pop("TRITON_INTERPRET", None)  # before Triton is imported, here and in the processes
    chosen = []
    for module in options.module or MODULES:
        listed = tasks(module)
        if options.first:
            first = {task.name: task for task in reversed(listed)}
            listed = list(reversed(first.values()))[: options.first]
        chosen += listed
    outcomes = []
    for outcome in compiled(chosen):
        outcomes.append(outcome)
        print(f"{outcome.task}: {list(outcome.numbers) or outcome.faults[0]}", flush=True)
    versions: dict[str, Found] = json.loads(options.path.read_text())["triton"] if options.path.exists() else {}
    triton, found = version("triton"), gathered(outcomes)
    wrong = [f"{one.task}: {fault}" for one in outcomes for fault in one.faults]
    if not options.check:
        options.path.write_text(text(versions | {triton: found}))
    elif triton in versions:
        wrong += differences(versions[triton], found, whole=not options.first)
    else:
        print(f"triton {triton} is not recorded in {options.path.name}: nothing to compare with")
    print(f"{len(outcomes)} compilations with triton {triton}, {len(wrong)} faults")
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
