"""Whose fault an exception is: the innermost part in its traceback.

A scheduler calls the allocator, a runner calls kernels and attention: what comes out of the outer one may be the inner
one's. Nothing is wrapped for that, so that calls between parts cost nothing; the traceback is read once one has failed.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import CodeType, FrameType, TracebackType
from typing import Any

from attrs import frozen

from intarsia.errors import IntarsiaError
from intarsia.protocols import Parts, Selection
from intarsia.saying import is_raised, said

#: A part, and the choice that brought it here.
Owned = tuple[object, Selection]


@frozen
class Fault:
    """A part that failed, and in what."""

    owner: Selection
    doing: str

    def says(self, error: BaseException, request_id: str | None = None) -> str:
        """Return the message: the part, its plugin, distribution and version, what it was doing and what it raised."""
        request = "" if request_id is None else f" of request {request_id!r}"
        return f"{self.owner.title} failed in {self.doing}{request}: {said(error)}"


def find_fault(error: BaseException, owned: Iterable[Owned]) -> Fault | None:
    """Return the innermost part in an error's traceback, and which of its functions was called; None where none is.

    A frame is a part's where its `self` is the part, or its module or top-level package is that of one part alone.
    """
    known = _Known.of(owned)
    owners = [(known.owner(frame), frame.f_code.co_name) for frame, _ in traceback.walk_tb(error.__traceback__)]
    found: Fault | None = None
    for owner, name in reversed(owners):
        if owner is None:
            continue
        if found is not None and owner is not found.owner:
            break
        found = Fault(owner, name)  # outwards to where the part was entered
    return found


@frozen(eq=False)
class Naming:
    """A context manager: what a part raises in its block becomes an error that names it; what is nobody's passes.

    It has no state of its own: made once, it costs a tenth of a microsecond.

    Attributes:
        owned: returns the parts that can fail; asked where something has.
        error_class: of the error.
        passing: errors that pass too, as they may be the fault of something else.
    """

    owned: Callable[[], Iterable[Owned]]
    error_class: type[IntarsiaError]
    passing: tuple[type[Exception], ...] = ()

    def __enter__(self) -> None:
        return

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or not is_raised(error) or isinstance(error, (IntarsiaError, *self.passing)):
            return
        fault = find_fault(error, self.owned())
        if fault is not None:
            raised = self.error_class(fault.says(error))
            raised.owner = fault.owner.title
            raise raised from error


@frozen
class _Known:
    """Parts by what a frame shows of them; where several could be meant, none is."""

    parts: Mapping[int, Selection]
    modules: Mapping[str, Selection | None]
    packages: Mapping[str, Selection | None]

    @classmethod
    def of(cls, owned: Iterable[Owned]) -> _Known:
        parts: dict[int, Selection] = {}
        modules: dict[str, Selection | None] = {}
        packages: dict[str, Selection | None] = {}
        for part, selection in owned:
            part = part.func if isinstance(part, functools.partial) else part
            code = getattr(part, "__code__", None) if callable(part) else None
            parts[id(code if isinstance(code, CodeType) else part)] = selection
            module = str(getattr(part, "__module__", ""))
            for names, name in ((modules, module), (packages, module.partition(".")[0])):
                names[name] = selection if names.get(name, selection) is selection else None
        return cls(parts, modules, packages)

    def owner(self, frame: FrameType) -> Selection | None:
        """Return whose frame this is."""
        for value in (frame.f_code, frame.f_locals.get("self")):
            if value is not None and (owner := self.parts.get(id(value))) is not None:
                return owner
        module = str(frame.f_globals.get("__name__", ""))
        package = module.partition(".")[0]
        # Modules of the core serve many parts, some of which are not here.
        inside = None if package == "intarsia" else self.packages.get(package)
        return self.modules.get(module) or inside


def owned_by(selections: Sequence[Selection], **slots: Any) -> list[Owned]:
    """Pair parts with the choices that brought them: slot -> a part, or a tuple where it holds several."""
    pairs: list[Owned] = []
    for slot, part in slots.items():
        chosen = [selection for selection in selections if selection.slot == slot]
        pairs += zip(part if isinstance(part, tuple) else (part,), chosen, strict=False)
    return [(part, selection) for part, selection in pairs if part is not None]


def kernels_of(selections: Sequence[Selection], ops: Any) -> list[Owned]:
    """Pair the functions that compute ops, and those that pack weights for them, with whose they are."""
    chosen = {selection.provider.key: selection for selection in selections if selection.slot == "kernels"}
    kernels = [(choice.kernel, chosen.get(choice.source)) for choice in ops.choices.values()]
    calls = [(call, owner) for kernel, owner in kernels for call in (kernel.call, kernel.pack)]
    return [(call, owner) for call, owner in calls if call is not None and owner is not None]


def engine_parts(parts: Parts) -> list[Owned]:
    """Return an engine's parts, but for what its executor makes of them."""
    return owned_by(
        parts.selections,
        loader=parts.checkpoint,
        attention=parts.attention,
        cache=parts.cache,
        scheduler=parts.scheduler,
        executor=parts.executor,
        quantizer=parts.quantizers,
        drafter=parts.drafter,
        logits_processors=parts.logits_processors,
    ) + kernels_of(parts.selections, parts.ops)
