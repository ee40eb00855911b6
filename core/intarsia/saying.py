"""What an exception says, in a message: whatever a part raises, telling of it cannot fail."""

from __future__ import annotations

__all__ = ["is_fault", "is_raised", "said", "text_of"]

#: What is raised by code and not by signals, though it is no Exception. By name: asyncio costs time to import.
_FAULTS = ("SystemExit", "CancelledError", "GeneratorExit", "BaseExceptionGroup", "PanicException")


def said(error: BaseException) -> str:
    """Return an exception's type and text; its type alone where it has none."""
    text = text_of(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def text_of(error: BaseException) -> str:
    """Return an exception's text. Its `__str__` is somebody else's code, and where that fails, this says so."""
    try:
        return str(error)
    except Exception as failure:
        return f"(its __str__ raises {type(failure).__name__})"


def is_fault(error: BaseException) -> bool:
    """Whether code that was called has failed with this, and no signal came: an Exception, an exit, a panic in Rust."""
    return isinstance(error, Exception) or any(cls.__name__ in _FAULTS for cls in type(error).__mro__)


def is_raised(error: BaseException) -> bool:
    """Whether code has failed with this while an engine runs: then an exit may be that of a program's own handler."""
    return is_fault(error) and not isinstance(error, SystemExit)
