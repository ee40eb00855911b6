"""The trial's process: compiles constraints where it harms nobody, one after another, as lines of JSON come in.

`python -m intarsia_structured.trial` is started by `sandbox.py`. A constraint can make llguidance run for ever, take
all memory or overflow the stack, which kills the process: here that ends the trial alone.
"""

from __future__ import annotations

import base64
import contextlib
import faulthandler
import json
import random
import sys
import threading
import time
from typing import Any

from intarsia_structured.grammar import GrammarError, Vocabulary, lark_of, matcher_of

#: Less than the engine's own threads have, so that what passes here passes there.
_STACK_BYTES = 2 << 20
_MEMORY_BYTES = 2 << 30
#: Masks that are computed along a random answer, and the longest that one may take, in seconds of this thread.
_NUM_STEPS = 32
_SLOW_S = 0.5


def main() -> None:
    """Read the vocabulary, then answer a line for each constraint: its Lark, or why it is refused."""
    _limit_process()
    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=_serve)
    thread.start()
    thread.join()


def _serve() -> None:
    opening = json.loads(sys.stdin.readline())
    tokens = [base64.b64decode(each) for each in opening["tokens"]]
    tokenizer = Vocabulary(tokens, tuple(opening["special_ids"]), tuple(opening["eos_ids"])).tokenizer()
    for line in sys.stdin:
        asked = json.loads(line)
        # Should whoever waits be gone, this process still ends.
        faulthandler.dump_traceback_later(2 * asked["timeout_s"] + 1, exit=True)
        answer = _try(tokenizer, asked)
        faulthandler.cancel_dump_traceback_later()
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _try(tokenizer: Any, asked: dict[str, Any]) -> dict[str, str]:
    try:
        lark = lark_of(asked["kind"], asked["source"], asked["max_whitespace"])
        _walk(matcher_of(tokenizer, lark), tokenizer.eos_tokens, time.monotonic() + asked["timeout_s"] / 4)
    except GrammarError as error:
        return {"error": str(error)}
    return {"lark": lark}


def _walk(matcher: Any, eos_ids: list[int], until: float) -> None:
    """Follow a random answer; raise GrammarError where a mask is so slow that it would hold up the engine."""
    draws = random.Random(0)  # noqa: S311
    for _ in range(_NUM_STEPS):
        began = time.thread_time()
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        if time.thread_time() - began > _SLOW_S:
            raise GrammarError(f"takes more than {_SLOW_S} s a token")
        for one in eos_ids:
            mask &= ~(1 << one)
        if matcher.is_error() or not mask or time.monotonic() > until:
            return
        allowed = [index for index, bit in enumerate(reversed(f"{mask:b}")) if bit == "1"]
        if not matcher.consume_token(draws.choice(allowed)):
            return


def _limit_process() -> None:
    """Bound memory and leave no core dumps, where the system can do so."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))


if __name__ == "__main__":
    main()
