"""What speculation is measured on: chats about texts that come with every Python, which answers repeat or do not."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable

from attrs import frozen

from intarsia.types import Message, SamplingParams

#: Modules of the standard library; each repeat of a workload has its own, or what came before would be known.
MODULES = ("bisect", "fnmatch", "colorsys", "sched", "graphlib", "textwrap", "shlex", "string", "heapq", "glob")
#: Topics of Python's own help.
TOPICS = (
    "assignment",
    "comparisons",
    "function",
    "calls",
    "naming",
    "objects",
    "strings",
    "try",
    "execmodel",
    "import",
)
#: Letters of a text that is asked about.
LETTERS = 1400


@frozen
class Ask:
    """One request."""

    messages: tuple[Message, ...]
    params: SamplingParams


def _chat(text: str, *, sampled: int | None = None, max_tokens: int = 160) -> Ask:
    choosing = {"temperature": 0.0} if sampled is None else {"temperature": 0.8, "top_p": 0.95, "seed": sampled}
    params = SamplingParams(max_tokens=max_tokens, **choosing)  # type: ignore[arg-type]
    return Ask(({"role": "user", "content": text},), params)


def _code(index: int) -> str:
    return inspect.getsource(importlib.import_module(MODULES[index % len(MODULES)]))[-LETTERS:]


def _topic(index: int) -> str:
    from pydoc_data.topics import topics

    return topics[TOPICS[index % len(TOPICS)]][:LETTERS]


def edit(repeat: int) -> list[Ask]:
    """Say code again with a change."""
    return [_chat(f"Repeat this code, with `self` renamed to `this`:\n```python\n{_code(repeat)}\n```")]


def extract(repeat: int) -> list[Ask]:
    """Copy parts of a text out of it."""
    return [_chat(f"{_topic(repeat)}\n\nCopy the first three paragraphs of this text, word by word.")]


def quote(repeat: int) -> list[Ask]:
    """Sum a text up, with quotes."""
    return [_chat(f"{_topic(repeat)}\n\nSummarise this text, and quote the sentences that you refer to.")]


_FREE = (
    "Tell me a story about a lighthouse.",
    "What should I cook tonight, and why?",
    "Write a letter to a friend who moved abroad.",
    "Explain how rain comes about.",
    "Describe a town on another planet.",
    "Give me advice for a job interview.",
    "Why do people like music?",
    "Write a short speech for a wedding.",
)


def free(repeat: int) -> list[Ask]:
    """Free text with sampling: nothing to copy."""
    return [_chat(_FREE[repeat % len(_FREE)], sampled=repeat)]


def batch16(repeat: int) -> list[Ask]:
    """16 at once: free text with sampling, and four that repeat their prompts."""
    asks = [_chat(_FREE[i % len(_FREE)], sampled=100 * repeat + i, max_tokens=64) for i in range(12)]
    return asks + [_chat(f"Repeat this:\n{_topic(repeat + i)[:600]}", max_tokens=64) for i in range(4)]


ALL: dict[str, Callable[[int], list[Ask]]] = {f.__name__: f for f in (edit, extract, quote, free, batch16)}
