"""The recorded surface: it is current, its changes are named, and hooks that change say so in their version."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from intarsia.hookspecs import API
from intarsia.protocols import Scheduler

ROOT = Path(__file__).parents[2]
NEWS = """\
# Changelog

## [Unreleased]

### Added

- `Scheduler` can be asked for `expected_wait`.
- `BatchPlan` gains `budget`.
- A class `Watchdog`.

## [0.1.0] - 2026-01-01

- The engine.
"""


@pytest.fixture(scope="module")
def surface():
    spec = importlib.util.spec_from_file_location("surface", ROOT / "docs/surface.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def current(surface):
    return surface.facts()


def test_the_recorded_surface_is_current_and_the_changelog_names_what_changed():
    command = [sys.executable, ROOT / "docs/surface.py", "--check"]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert run.returncode == 0, run.stderr


def test_hooks_protocols_types_errors_ops_and_suites_are_in_it(current):
    for fact in (
        "hookspecs step_finished(result, outputs, seconds) api=1",
        "hookspecs provide_schedulers() api=1 slot=scheduler part=Scheduler context=PartContext",
        "protocols Scheduler class",
        "protocols Scheduler.plan() -> BatchPlan",
        "protocols Scheduler.num_waiting: int",
        "protocols Drafter.forget(sequence_id: SequenceId) -> None [inherited]",
        "protocols Drafter.propose(requests: Sequence[DraftRequest]) -> Sequence[Draft]",
        "types BatchPlan.rows: tuple[Row, ...] = ()",
        "types PENDING = -1",
        "types Want.LAST = 'last'",
        "errors OverloadedError(message: str, *, retry_after_s: float) -> None",
        "errors CheckpointError(IntarsiaError) code=checkpoint",
        "ops op rms_norm",
        "ops rms_norm(x_TE: torch.Tensor, weight_E: torch.Tensor, eps: float) -> torch.Tensor",
        "intarsia Engine.cancel(request_id: str) -> None",
        "testing.schedulers SchedulerContract.ages = True",
    ):
        assert fact in current
    assert {fact.split("(")[0] for fact in current if " api=" in fact} == {f"hookspecs {hook}" for hook in API}
    members = {name for name in vars(Scheduler) if not name.startswith("_")}
    found = {fact.split(".")[1] for fact in current if fact.startswith("protocols Scheduler.")}
    assert {name.partition("(")[0].partition(":")[0] for name in found} == members


def test_a_change_stands_beside_what_it_changed_until_a_release(surface):
    old, new = "types Row.start: int", "types Row.start: int = 0"
    same = "types Row.pages: tuple = ()"
    recorded = surface.read(surface.written({old: " ", same: " "}))
    signs = surface.merged(recorded, {new, same})
    assert surface.written(signs).splitlines()[1:] == [f"  {same}", f"- {old}", f"+ {new}"]
    # Run again it says the same; what is taken back leaves no trace.
    assert surface.merged(surface.read(surface.written(signs)), {new, same}) == signs
    assert surface.merged(signs, {old, same}) == {old: " ", same: " "}


@pytest.mark.parametrize(
    ("fact", "sign", "missing"),
    [
        ("types BatchPlan.budget: int = 0", "+", None),
        ("types BatchPlan.limit: int = 0", "+", "BatchPlan.limit"),
        ("types BatchPlan.moves: tuple = ()", "-", "BatchPlan.moves"),
        ("types Watchdog class", "+", None),
        ("types Watchdogs class", "+", "Watchdogs"),
        ("errors LostError(IntarsiaError) code=lost", "-", "LostError"),
        ("ops op fast_fourier", "+", "fast_fourier"),
        # Named in the section of a release, which is past.
        ("types engine class", "+", "engine"),
    ],
)
def test_the_changelog_must_name_a_change_in_its_section_on_what_is_to_come(surface, fact, sign, missing):
    found = surface.complaints({fact: sign, "types Row class": " "}, NEWS)
    assert found == ([] if missing is None else [found[0]])
    if missing is not None:
        assert f"does not name {missing}, which changed" in found[0]


def test_members_of_a_class_that_came_whole_need_no_names_of_their_own(surface):
    changed = {"types Watchdog class": "+", "types Watchdog.bark() -> None": "+"}
    assert surface.complaints(changed, NEWS) == []


def test_without_a_section_on_what_is_to_come_nothing_is_named(surface):
    released = NEWS.replace("[Unreleased]", "[0.2.0] - 2026-06-01")
    assert surface.complaints({"types BatchPlan.budget: int = 0": "+"}, released)


@pytest.mark.parametrize(
    ("changed", "breaks"),
    [
        ({"protocols Scheduler.expected_wait() -> float": "+"}, True),
        ({"protocols Scheduler.expected_wait() -> float [inherited]": "+"}, False),
        ({"protocols Scheduler.expected_wait() -> float": "-"}, True),
        ({"protocols PartContext.expected_wait: float = 0.0": "+"}, False),
        ({"protocols PartContext.expected_wait: float = 0.0": "-"}, True),
        ({"types Scheduler.expected_wait: float": "-"}, False),
    ],
)
def test_a_change_that_breaks_parts_raises_the_version_of_their_hook(surface, changed, breaks):
    says = "provide_schedulers: what its parts must do changed, and it is still version 1"
    news = NEWS.replace("`Scheduler`", "`Scheduler` and `PartContext`")
    found = surface.complaints(changed, news)
    assert any(each.startswith(says) for each in found) == breaks
    raised = {"hookspecs provide_schedulers() api=1 slot=x": "-", "hookspecs provide_schedulers() api=2 slot=x": "+"}
    assert not any(each.startswith(says) for each in surface.complaints(changed | raised, news))
