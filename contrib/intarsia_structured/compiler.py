"""Compiles constraints outside the engine's thread and keeps those that were used last."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

from attrs import define, field, frozen

from intarsia_structured.constraint import Constraint
from intarsia_structured.grammar import GrammarError, Vocabulary, matcher_of
from intarsia_structured.options import StructuredOptions
from intarsia_structured.sandbox import Sandbox


@frozen(eq=False)
class Compiled:
    """A constraint that compiled: sequences match with copies of its matcher.

    Attributes:
        resumable: whether a matcher can be rolled back. Attributes of Lark's rules that drop tokens, or count them,
            keep llguidance from doing so rightly.
    """

    constraint: Constraint
    resumable: bool
    _matcher: Any

    def matcher(self) -> Any:
        """Return a matcher of its own, at the start of an answer."""
        return self._matcher.deep_copy()


@define(eq=False)
class Compiler:
    """Futures of compiled constraints, by content. Any thread may ask."""

    vocabulary: Vocabulary
    options: StructuredOptions
    _tokenizer: Any = field(init=False)
    _pool: ThreadPoolExecutor = field(init=False)
    _sandboxes: SimpleQueue[Sandbox] = field(factory=SimpleQueue, init=False)
    _kept: OrderedDict[Constraint, Future[Compiled]] = field(factory=OrderedDict, init=False)
    #: what a sequence still follows is found after the cache has dropped it
    _live: weakref.WeakValueDictionary[Constraint, Compiled] = field(factory=weakref.WeakValueDictionary, init=False)
    _lock: threading.Lock = field(factory=threading.Lock, init=False)

    def __attrs_post_init__(self) -> None:
        options = self.options
        self._tokenizer = self.vocabulary.tokenizer()
        self._pool = ThreadPoolExecutor(options.workers, thread_name_prefix="intarsia-structured")
        for _ in range(options.workers):
            self._sandboxes.put(Sandbox(self.vocabulary, options.max_whitespace, options.timeout_s))
        # Its threads end when nobody can ask any more.
        weakref.finalize(self, self._pool.shutdown, wait=False, cancel_futures=True)

    def compiled(self, constraint: Constraint) -> Future[Compiled]:
        """Return a constraint, compiled or being compiled. Its future raises InvalidRequestError where it cannot be."""
        with self._lock:
            future = self._kept.get(constraint)
            begun = future is None
            if future is None:
                future = self._kept[constraint] = self._begin(constraint)
            self._kept.move_to_end(constraint)
            while len(self._kept) > self.options.cache_size:
                self._kept.popitem(last=False)
        if begun:  # not under the lock: of what is done already the callback runs here and now, and takes it
            future.add_done_callback(_Keeping(weakref.ref(self), constraint))
        return future

    def _begin(self, constraint: Constraint) -> Future[Compiled]:
        alive = self._live.get(constraint)
        if alive is not None:
            future: Future[Compiled] = Future()
            future.set_result(alive)
            return future
        work = _Work(constraint, self._tokenizer, self._sandboxes)
        return self._pool.submit(work.run)

    def settle(self, constraint: Constraint, future: Future[Compiled]) -> None:
        """Take note of a future that is done. A failure is not kept: the next to ask may have more luck with time."""
        failed = future.cancelled() or future.exception() is not None
        with self._lock:
            if not failed:
                self._live[constraint] = future.result()
            elif self._kept.get(constraint) is future:
                del self._kept[constraint]


@frozen
class _Work:
    """One constraint to compile. It holds no compiler: one that nobody uses can go while this runs."""

    constraint: Constraint
    tokenizer: Any
    sandboxes: SimpleQueue[Sandbox]

    def run(self) -> Compiled:
        sandbox = self.sandboxes.get()
        try:
            lark = sandbox.lark(self.constraint)
            matcher = matcher_of(self.tokenizer, lark)
        except GrammarError as error:
            raise self.constraint.refused(f"cannot be followed: {error}") from None
        finally:
            self.sandboxes.put(sandbox)
        return Compiled(self.constraint, resumable=not _drops_tokens(self.constraint), matcher=matcher)


@frozen
class _Keeping:
    """Tells a compiler, if it is still there, that a future is done."""

    compiler: weakref.ref[Compiler]
    constraint: Constraint

    def __call__(self, future: Future[Compiled]) -> None:
        compiler = self.compiler()
        if compiler is not None:
            compiler.settle(self.constraint, future)


def _drops_tokens(constraint: Constraint) -> bool:
    words = ("stop", "suffix", "lazy", "max_tokens")
    return constraint.kind == "grammar" and any(word in constraint.source for word in words)
