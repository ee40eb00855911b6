"""Constraints are compiled in a process of their own first: what does not come back from there never gets here."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import threading
import weakref
from typing import Any

from attrs import define, field

from intarsia_structured.constraint import Constraint
from intarsia_structured.grammar import GrammarError, Vocabulary

#: For the first constraint, to start a Python and read a vocabulary.
_START_S = 30.0


@define(eq=False)
class Sandbox:
    """One trial's process, started when it is first needed and again after it has died. One thread at a time.

    Attributes:
        vocabulary: what the process matches against.
        max_whitespace: see `StructuredOptions`.
        timeout_s: the longest that one trial takes.
    """

    vocabulary: Vocabulary
    max_whitespace: int
    timeout_s: float
    _process: subprocess.Popen[str] | None = field(default=None, init=False)

    def lark(self, constraint: Constraint) -> str:
        """Return a constraint as Lark that compiled there.

        Raises:
            GrammarError: it did not compile, or not in time, or its process died of it.
        """
        process = self._started()
        asked = {
            "kind": constraint.kind,
            "source": constraint.source,
            "max_whitespace": self.max_whitespace,
            "timeout_s": self.timeout_s,
        }
        answer = self._ask(process, json.dumps(asked), self.timeout_s)
        if "error" in answer:
            raise GrammarError(answer["error"])
        return str(answer["lark"])

    def _started(self) -> subprocess.Popen[str]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        process = subprocess.Popen(
            [sys.executable, "-m", "intarsia_structured.trial"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._process = process
        weakref.finalize(self, _end, process)
        vocabulary = self.vocabulary
        opening = {
            "tokens": [base64.b64encode(token).decode() for token in vocabulary.tokens],
            "special_ids": vocabulary.special_ids,
            "eos_ids": vocabulary.eos_ids,
        }
        # The simplest of constraints, so that the first one's time is its own.
        first = {"kind": "regex", "source": "", "max_whitespace": 0, "timeout_s": _START_S}
        self._ask(process, f"{json.dumps(opening)}\n{json.dumps(first)}", _START_S)
        return process

    def _ask(self, process: subprocess.Popen[str], line: str, timeout_s: float) -> dict[str, Any]:
        """Write a line and return the answer. A process that does not answer in time is killed."""
        assert process.stdin is not None and process.stdout is not None
        late = threading.Event()

        def kill() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(timeout_s, kill)
        timer.daemon = True
        timer.start()
        try:
            process.stdin.write(line + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except OSError:
            answer = ""
        finally:
            timer.cancel()
        if not answer.endswith("\n"):
            _end(process)
            why = (
                f"takes longer than {timeout_s:g} s (logits_processors.timeout_s)"
                if late.is_set()
                else "is too complex"
            )
            raise GrammarError(f"{why} to compile")
        loaded: dict[str, Any] = json.loads(answer)
        return loaded


def _end(process: subprocess.Popen[str]) -> None:
    """Kill a trial's process and collect it; safe where it is gone."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            try:
                pipe.close()
            except OSError:  # what was not flushed to a process that is gone
                continue
