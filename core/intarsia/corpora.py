"""English text that is on every Python, for measuring models; and text from files."""

from __future__ import annotations

import ast
import importlib
import sysconfig
from pathlib import Path

from attrs import frozen

from intarsia.errors import ConfigError

#: What is evaluated by default: Python's help topics.
EVALUATION = "pydoc_data.topics"
#: What is calibrated with by default: the docstrings of these modules, none of which is a part of the help topics.
DOCUMENTED = (
    "argparse",
    "asyncio.streams",
    "configparser",
    "difflib",
    "doctest",
    "email.message",
    "functools",
    "heapq",
    "http.client",
    "http.cookiejar",
    "imaplib",
    "inspect",
    "ipaddress",
    "logging",
    "logging.handlers",
    "mailbox",
    "optparse",
    "pathlib",
    "pickletools",
    "random",
    "shutil",
    "smtplib",
    "socketserver",
    "statistics",
    "subprocess",
    "tarfile",
    "textwrap",
    "threading",
    "timeit",
    "traceback",
    "typing",
    "unittest.case",
    "unittest.mock",
    "urllib.parse",
    "urllib.request",
    "uuid",
    "xml.etree.ElementTree",
    "zipfile",
)
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@frozen
class Text:
    """A text and where it is from, for reports."""

    source: str
    content: str


def evaluation_text() -> Text:
    """Return Python's help topics in the order of their names, some 500 kB of English.

    Their number and wording are the Python version's.
    """
    topics: dict[str, str] = importlib.import_module(EVALUATION).topics
    return Text(EVALUATION, "\n\n".join(topics[name] for name in sorted(topics)))


def calibration_text() -> Text:
    """Return the docstrings of modules of the standard library, some 400 kB of English. No module is imported.

    Raises:
        ConfigError: this Python comes without the sources of its library.
    """
    docstrings = [docstring for module in DOCUMENTED for docstring in _docstrings(module)]
    if not docstrings:
        raise ConfigError("--text: this Python has no sources of its library to take a text from; name a file")
    return Text("docstrings of the standard library", "\n\n".join(docstrings))


def _docstrings(module: str) -> list[str]:
    path = Path(sysconfig.get_path("stdlib"), *module.split("."))
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.is_file():
            tree = ast.parse(file.read_bytes())
            nodes = [node for node in ast.walk(tree) if isinstance(node, _DOCUMENTED)]
            return [docstring for node in nodes if (docstring := ast.get_docstring(node))]
    return []


def read_text(path: Path) -> Text:
    """Return a file's text.

    Raises:
        ConfigError: it cannot be read, or is not UTF-8.
    """
    try:
        return Text(path.name, path.read_bytes().decode("utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"--text: {str(path)!r} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"--text: {str(path)!r} is not UTF-8 text: {error}") from None
