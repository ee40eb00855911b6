"""Ways in: what frontends drive, and the commands of plugins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from intarsia.types import Choice, Output, Prompt, Request

if TYPE_CHECKING:
    import click

    from intarsia.protocols.composition import Parts


class Progress(Protocol):
    """Told of long work: (what, done, total). Called often; must be cheap."""

    def __call__(self, what: str, done: int, total: int) -> None:
        """Show that `done` of `total` is done."""
        ...


class EngineHandle(Protocol):
    """What a frontend drives. The engine is single-threaded: one thread calls it."""

    def add(self, request: Request) -> str:
        """Take a request; raise InvalidRequestError or OverloadedError, then nothing has changed."""
        ...

    def step(self) -> Sequence[Output]:
        """Run one step and return what it brought; empty where there was nothing to do."""
        ...

    def cancel(self, request_id: str) -> None:
        """End a request; its last outputs, with finish_reason `abort`, come from the next `step`."""
        ...

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do or to return."""
        ...

    @property
    def parts(self) -> Parts:
        """What the engine is made of."""
        ...

    def tokenize(self, prompt: Prompt) -> list[int]:
        """Return a prompt's token ids; raise InvalidRequestError as `add` does."""
        ...

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ids; raise InvalidRequestError where the model has no tokenizer."""
        ...

    def stats(self) -> Mapping[str, Any]:
        """Return figures: queues, cache, steps, tokens."""
        ...

    def explain(self) -> Mapping[str, Any]:
        """Return what the engine is made of and why."""
        ...

    def swap(self, slot: str, choice: Choice) -> Mapping[str, Any]:
        """Replace a part while requests run, and return what was done; where it raises, the one before goes on."""
        ...

    def close(self) -> None:
        """Stop the engine."""
        ...


class Frontend(Protocol):
    """A way in: serves an engine to clients."""

    def serve(self) -> None:
        """Run until told to stop."""
        ...


class Command(Protocol):
    """A CLI command of a plugin."""

    def command(self) -> click.Command:
        """Return the click command; its name is the provider's key."""
        ...
