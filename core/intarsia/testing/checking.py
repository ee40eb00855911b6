"""Contracts run on an installed plugin: the process behind `intarsia plugins check`.

A process of its own, so that a part that crashes or hangs costs a claim and not the report. It reads one JSON object
from stdin, `{"plugin", "parts", "claims", "done"}`, and writes JSON objects to stdout, one a line, as things happen:

| event | says |
| --- | --- |
| `part` | `part`, `contract`: where its contract is, `claims`: their names; or `error`: why it has none |
| `begun` | `part`, `claim` and `case`: what runs now |
| `ended` | the same, `says`, `outcome`, `message`, `details`, `seconds` |
| `over` | all is done |

An outcome is `kept`, `skipped` (a claim that the part does not make), `broken`, or `untold`: the contract must be told
something that it has no default for. Nothing of the folder that a user is in takes part: no conftest.py, no settings.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from attrs import define, field

from intarsia.errors import PluginError
from intarsia.plugins import Registry
from intarsia.testing.suites import contract_of, part_name
from intarsia.types import PluginsOptions

if TYPE_CHECKING:
    import pytest

Send: TypeAlias = Callable[..., None]

#: The file that pytest collects. It asks for the contracts itself, so that asserts in the suites say what they saw.
_TESTS = """\
import json
import pathlib

import pytest

pytest.register_assert_rewrite("intarsia.testing")
from intarsia.testing.checking import classes

globals().update(classes(**json.loads(pathlib.Path(__file__).with_name("job.json").read_text("utf-8"))))
"""


def classes(plugin: str, parts: Sequence[str]) -> dict[str, type]:
    """Return the contracts of some parts of a plugin as test classes, by names that pytest collects."""
    registry = Registry.discover(PluginsOptions(allow=(plugin,)))
    offers = {part_name(offer): offer for offer in registry.all_offers()}
    return {_class_name(part): contract_of(offers[part]) for part in parts}


def _class_name(part: str) -> str:
    return f"Test_{part.replace('.', '__')}"


def _is_claim(name: str) -> bool:
    return name.startswith("test_")


def _doc(item: pytest.Item) -> str:
    doc = getattr(getattr(item, "function", None), "__doc__", None) or ""
    return " ".join(doc.strip().split("\n\n")[0].split())


def _message(error: BaseException) -> str:
    """Return what is wrong, in a line or a few: an assertion's own words, whatever else with its type."""
    text = str(error).strip()
    notes = "\n".join(getattr(error, "__notes__", ()))
    said = text if isinstance(error, AssertionError) and text else f"{type(error).__name__}: {text}".rstrip(": ")
    return f"{said}\n{notes}".strip()


@define(eq=False)
class Reporter:
    """A plugin of pytest's that tells what becomes of each claim.

    Attributes:
        send: takes events.
        parts: name of a test class -> the part that it is of.
        claims: names of those that run; empty is all.
        done: (part, case) that ran before: a process that crashed is followed by another.
    """

    send: Send
    parts: Mapping[str, str]
    claims: frozenset[str]
    done: frozenset[tuple[str, str]]
    _errors: dict[str, BaseException] = field(factory=dict, init=False)
    _reports: list[pytest.TestReport] = field(factory=list, init=False)
    _items: dict[str, pytest.Item] = field(factory=dict, init=False)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leave out what is not asked for."""
        items[:] = [item for item in items if self._is_wanted(item)]
        self._items = {item.nodeid: item for item in items}

    def _is_wanted(self, item: pytest.Item) -> bool:
        part, claim, case = self._names(item)
        return (not self.claims or claim in self.claims) and (part, case) not in self.done

    def _names(self, item: pytest.Item) -> tuple[str, str, str]:
        owner: Any = getattr(item, "cls", None)
        class_name = next(name for name in item.nodeid.split("::") if name in self.parts)
        assert owner is not None
        return self.parts[class_name], str(getattr(item, "originalname", item.name)), item.name

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Tell that a claim begins."""
        self._reports.clear()
        part, claim, case = self._names(self._items[nodeid])
        self.send(event="begun", part=part, claim=claim, case=case)

    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> None:
        """Keep what was raised; the report has its text alone."""
        if call.excinfo is not None:
            self._errors[item.nodeid] = call.excinfo.value

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep what became of set-up, claim and tear-down."""
        self._reports.append(report)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Tell what became of a claim."""
        item = self._items[nodeid]
        part, claim, case = self._names(item)
        outcome, message, details = self._outcome(nodeid)
        self.send(
            event="ended",
            part=part,
            claim=claim,
            case=case,
            says=_doc(item),
            outcome=outcome,
            message=message,
            details=details,
            seconds=round(sum(report.duration for report in self._reports), 3),
        )

    def _outcome(self, nodeid: str) -> tuple[str, str, str]:
        error = self._errors.get(nodeid)
        failed = [report for report in self._reports if report.failed]
        if failed:
            outcome = "untold" if isinstance(error, NotImplementedError) else "broken"
            message = str(error) if outcome == "untold" and error is not None else ""
            details = "\n".join(report.longreprtext for report in failed)
            return outcome, message or (_message(error) if error is not None else details), details
        if any(report.skipped for report in self._reports):
            return "skipped", str(error) if error is not None else "", ""
        return "kept", "", ""


def _events() -> Send:
    """Take stdout for events alone: what parts print goes to stderr from here on."""
    stream = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def send(**event: Any) -> None:
        stream.write(json.dumps(event) + "\n")
        stream.flush()

    return send


def _runnable(registry: Registry, parts: Iterable[str], send: Send) -> list[str]:
    """Tell where the contract of each part is, or why it has none; return those that have one."""
    offers = {part_name(offer): offer for offer in registry.all_offers()}
    runnable = []
    for part in parts:
        try:
            contract = contract_of(offers[part])
        except PluginError as error:
            send(event="part", part=part, contract=None, error=str(error), claims=[])
            continue
        where = f"{contract.__module__}.{contract.__qualname__}"
        send(event="part", part=part, contract=where, error=None, claims=sorted(filter(_is_claim, dir(contract))))
        runnable.append(part)
    return runnable


def main() -> int:
    """Run the contracts that stdin asks for, in the folder that this process is in."""
    send = _events()
    job: dict[str, Any] = json.loads(sys.stdin.read())
    import pytest

    registry = Registry.discover(PluginsOptions(allow=(job["plugin"],)))
    parts = _runnable(registry, job["parts"], send)
    if parts:
        folder = Path.cwd()
        (folder / "job.json").write_text(json.dumps({"plugin": job["plugin"], "parts": parts}), "utf-8")
        (folder / "pytest.ini").write_text("[pytest]\n", "utf-8")
        tests = folder / "test_contracts.py"
        tests.write_text(_TESTS, "utf-8")
        reporter = Reporter(
            send=send,
            parts={_class_name(part): part for part in parts},
            claims=frozenset(job["claims"]),
            done=frozenset((part, case) for part, case in job["done"]),
        )
        settings = ["-c", str(folder / "pytest.ini"), "--rootdir", str(folder), "--noconftest"]
        # Not its terminal: nobody reads what it writes, and it asks for the width of one.
        quiet = ["-q", "--disable-warnings", "-p", "no:cacheprovider"]
        pytest.main([str(tests), *settings, *quiet, "--import-mode=importlib"], plugins=[reporter])
    send(event="over")
    return 0


if __name__ == "__main__":
    sys.exit(main())
