"""Whose fault it is: the innermost part in a traceback, found by its frames."""

from __future__ import annotations

import functools
import types

import pytest
from attrs import frozen

from intarsia.errors import ConfigError, ExecutionError
from intarsia.owners import Naming, find_fault
from intarsia.protocols import Selection
from intarsia.types import Provider


def selection(slot: str) -> Selection:
    provider = Provider(key="mine", summary="", build=lambda context: None)
    whose = {"plugin": "p", "distribution": "d", "version": "1.0"}
    return Selection(slot=slot, provider=provider, asked_by="config", reason="", options=None, **whose)


SCHEDULER, CACHE, KERNELS = map(selection, ("scheduler", "cache", "kernels"))


@frozen(eq=False)
class Part:
    """Calls what it was made with."""

    call: object

    def plan(self):
        return self._deeper()

    def _deeper(self):
        return self.call()


def fail():
    raise LookupError("my bug")


def raised_by(call) -> Exception:
    with pytest.raises(LookupError) as caught:
        call()
    return caught.value


def module_of(name: str, source: str) -> types.ModuleType:
    module = types.ModuleType(name)
    exec(source, module.__dict__)
    return module


def test_the_innermost_of_two_parts_is_named_by_what_was_called_of_it():
    inner = Part(fail)
    outer = Part(inner.plan)
    fault = find_fault(raised_by(outer.plan), [(outer, SCHEDULER), (inner, CACHE)])
    assert (fault.owner, fault.doing) == (CACHE, "plan")
    assert find_fault(raised_by(outer.plan), [(outer, SCHEDULER)]).owner is SCHEDULER
    says = "cache 'mine' of plugin 'p' (d 1.0) failed in plan of request 'r': LookupError: my bug"
    assert fault.says(raised_by(outer.plan), "r") == says


def test_what_is_nobodys_has_no_fault():
    assert find_fault(raised_by(fail), [(Part(fail), SCHEDULER), (Part(fail), CACHE)]) is None


def test_a_part_is_known_by_its_module_where_that_is_its_alone():
    module = module_of("outsider.tables", "def look_up():\n    raise LookupError('my bug')\nclass Part: pass\n")
    part = module.Part()
    assert find_fault(raised_by(module.look_up), [(part, CACHE)]).owner is CACHE
    assert find_fault(raised_by(module.look_up), [(part, CACHE), (module.Part(), SCHEDULER)]) is None


@pytest.mark.parametrize(("package", "found"), [("outsider", True), ("intarsia", False)])
def test_a_part_is_known_by_its_package_but_for_the_cores(package, found):
    helper = module_of(f"{package}.helper", "def look_up():\n    raise LookupError('my bug')\n")
    part = module_of(f"{package}.part", "class Part: pass\n").Part()
    fault = find_fault(raised_by(helper.look_up), [(part, CACHE)])
    assert (fault is not None) == found


def test_a_part_with_any_attributes_is_known_as_itself():
    """`func`, `__code__` or a `__getattr__` of a part's own do not make it a partial or a function."""

    class Keeper(Part):
        func = fail

        def __getattr__(self, name):
            raise KeyError(name)

    part = Keeper(fail)
    assert find_fault(raised_by(part.plan), [(part, CACHE), (Part(fail), SCHEDULER)]).owner is CACHE


def test_a_kernel_is_known_by_its_function():
    kernel = functools.partial(fail)
    assert find_fault(raised_by(kernel), [(kernel, KERNELS), (Part(fail), CACHE)]).owner is KERNELS


def test_errors_of_intarsias_own_and_interrupts_and_others_faults_pass():
    part = Part(fail)
    naming = Naming(lambda: [(part, CACHE)], ExecutionError, (RuntimeError,))
    for error in (ConfigError("wrong"), KeyboardInterrupt(), RuntimeError("a neighbour's")):

        def fails(error=error):
            raise error

        with pytest.raises(type(error)) as caught, naming:
            Part(fails).plan()
        assert caught.value is error
    with pytest.raises(ExecutionError, match=r"cache 'mine' .*LookupError: my bug") as caught, naming:
        part.plan()
    assert caught.value.owner == CACHE.title and isinstance(caught.value.__cause__, LookupError)
