"""A tutorial, followed: its edits are made and its commands run, in the order of the page.

What a page says of an edit, on a line of its own, and the block behind it do:

- "In `FILE`, `NAME` becomes:" replaces a function, a class or a field; or a whole line, where it is no name.
- "In `FILE`, before `NAME` comes:" and "after" insert.
- "In `FILE`, `NAME` goes." deletes; no block follows.

A `text` block is what the `sh` or `python` block before it says: its lines are there, and `...` stands for anything.
"""

import ast
import re
import textwrap
from pathlib import Path

from attrs import frozen

_FOUND = re.compile(
    r"^In `(?P<file>[^`]+)`, (?:(?P<side>before|after) )?`(?P<name>[^`]+)` (?P<verb>becomes:|comes:|goes\.)$"
    r"|^```(?P<language>\w*)\n(?P<block>.*?)^```$",
    flags=re.MULTILINE | re.DOTALL,
)


@frozen
class Edit:
    """A change of a file: `how` is becomes, before, after or goes."""

    file: str
    name: str
    how: str
    code: str = ""

    def make(self, folder: Path) -> None:
        """Change the file."""
        path = folder / self.file
        lines = path.read_text().splitlines()
        first, stop, indent = _place(lines, self.name)
        code = textwrap.indent(self.code, " " * indent, lambda line: bool(line.strip())).splitlines()
        gap = ["", ""] if self.how == "before" else []
        if self.how in ("before", "after"):
            first, stop = (first, first) if self.how == "before" else (stop, stop)
        path.write_text("\n".join([*lines[:first], *code, *gap, *lines[stop:]]) + "\n")


@frozen
class Block:
    """A block of a language, and what it says by the page."""

    language: str
    text: str
    says: str | None = None


def read(page: str) -> list[Edit | Block]:
    """Return a page's edits and blocks, in order."""
    steps: list[Edit | Block] = []
    pending = None
    for found in _FOUND.finditer(page):
        if found["file"]:
            assert pending is None, f"no block follows {pending}"
            edit = Edit(found["file"], found["name"], found["side"] or found["verb"].rstrip(":."))
            if edit.how == "goes":
                steps.append(edit)
            else:
                pending = edit
        elif pending is not None:
            steps.append(Edit(pending.file, pending.name, pending.how, found["block"]))
            pending = None
        elif found["language"] == "text":
            last = max(
                i for i, step in enumerate(steps) if isinstance(step, Block) and step.language in ("sh", "python")
            )
            assert steps[last].says is None
            steps[last] = Block(steps[last].language, steps[last].text, found["block"])
        else:
            steps.append(Block(found["language"], found["block"]))
    assert pending is None, f"no block follows {pending}"
    return steps


def missing(says: str | None, said: str) -> list[str]:
    """Return the lines that a block should have said and did not, whatever the spaces."""
    real = [" ".join(line.split()) for line in said.splitlines()]
    shown = [" ".join(line.split()) for line in (says or "").splitlines()]
    patterns = [re.escape(line).replace(r"\.\.\.", ".*") for line in shown]
    return [
        line for line, pattern in zip(shown, patterns, strict=True) if not any(re.fullmatch(pattern, r) for r in real)
    ]


def _place(lines: list[str], name: str) -> tuple[int, int, int]:
    """Return a definition's first line, the line behind it, and its indent; or those of a line that is no name."""
    if not name.isidentifier():
        first = lines.index(name)
        return first, first + 1, 0
    found = [node for node in ast.walk(ast.parse("\n".join(lines))) if name in _names(node)]
    assert len(found) == 1, f"{name} is there {len(found)} times"
    (node,) = found
    first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))]) - 1
    return first, node.end_lineno, node.col_offset


def _names(node: ast.AST) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {target.id for target in targets if isinstance(target, ast.Name)}
