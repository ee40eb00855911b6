"""Where chat templates run: a Jinja sandbox with bounds.

A chat template is a program that came with a model file. Jinja's immutable sandbox keeps it from the interpreter's
insides; this one also bounds what it takes. Counted as steps are every iteration of a loop, every item that a loop's
condition tests, and every call. Limited are the output, the text that operators, filters, calls and set blocks make,
the lists that operators make, whole numbers, and the sizes asked of padding filters and methods. Limited too is what is
written, compared or given to filters and calls: a list can hold another one twice, and that one another, so that forty
lists have a text of terabytes.

Not bounded: what one single operation of the standard library takes, such as `replace` of a short text by a long one
or a format string with a huge width. The time is looked at after each step, so one such operation can overrun it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, ItemsView, Iterator, KeysView, Mapping, ValuesView
from datetime import datetime
from functools import wraps
from typing import Any

from attrs import define
from jinja2 import Template, Undefined, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_STEPS = 500_000
MAX_SECONDS = 3.0
#: Characters of a text, items of a list.
MAX_SIZE = 16_000_000
#: Bits of a whole number.
MAX_BITS = 10_000

# Under this name a rendering's budget lies among its variables. No template can spell it.
_BUDGET = " budget"
# Filters and methods that make something as large as a number says.
_SIZED_FILTERS = ("batch", "center", "indent", "slice")
_SIZED_METHODS = ("center", "expandtabs", "ljust", "rjust", "zfill")
#: What does not go into the values that a list holds, for which a long chat is not looked through.
_SHALLOW_FILTERS = frozenset(
    {"attr", "batch", "count", "d", "default", "first", "items", "last", "length", "list", "map", "random", "reject"}
    | {"rejectattr", "reverse", "select", "selectattr", "slice"}
)
#: Those that go into the values: `x is eq(y)`. The others, such as `tools is none`, are asked often.
_COMPARING_TESTS = frozenset(
    {"==", "!=", "<", "<=", ">", ">=", "eq", "equalto", "ne", "in", "lt", "lessthan", "le", "gt", "greaterthan", "ge"}
)
_SHALLOW_CALLS = (Macro, LoopContext)
#: Values in lists and tables, counted each time that one is held; no chat has more.
_MAX_VALUES = 1_000_000


class TemplateRefusal(Exception):  # noqa: N818 it is the template's word, not a fault
    """What a template says by `raise_exception`."""


class BoundExceeded(Exception):  # noqa: N818
    """A template takes too much."""


@define
class _Budget:
    """What is left to one rendering."""

    deadline: float
    steps: int = MAX_STEPS

    def spend(self) -> None:
        self.steps -= 1
        if self.steps < 0:
            raise BoundExceeded(f"it runs for more than {MAX_STEPS} steps")
        if time.monotonic() > self.deadline:
            raise BoundExceeded(f"it runs for more than {MAX_SECONDS:g} seconds")


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks assistant text for training; here only its body counts."""

    tags = {"generation"}  # noqa: RUF012 as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _TemplateNamespace(Namespace):
    """Jinja's `namespace`, without names that Python's own protocols look up."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *mappings = args  # as Jinja has it: `namespace(self=...)` is a name like others
        Namespace.__init__(self)
        for name, value in dict(*mappings, **kwargs).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"namespace attribute {name!r} begins with an underscore")
        super().__setitem__(name, value)


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment of one template, with what Hugging Face's `apply_chat_template` offers to templates."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], finalize=_limit_tree
        )
        self.filters["tojson"] = _tojson
        for name, filter_ in self.filters.items():
            self.filters[name] = _bounded(filter_, sized=name in _SIZED_FILTERS, shallow=name in _SHALLOW_FILTERS)
        tests: dict[str, Any] = self.tests
        for name in _COMPARING_TESTS:
            tests[name] = _bounded(tests[name], sized=False, shallow=False)
        self.globals.pop("lipsum")
        self.globals |= {
            "dict": _Dict(),
            "namespace": _TemplateNamespace,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }

    def compile_bounded(self, tree: nodes.Template) -> Template:
        """Compile what `parse` returned, with loops that count their steps; raise what Jinja raises if it cannot."""
        for loop in list(tree.find_all(nodes.For)):
            loop.body.insert(0, nodes.ExprStmt(_call_of("tick"), lineno=loop.lineno))
            if loop.test is not None:
                loop.test = nodes.And(_call_of("tick"), loop.test)
        for concat in list(tree.find_all(nodes.Concat)):
            concat.nodes = [_call_of("concatenate", *concat.nodes)]
        for comparison in list(tree.find_all(nodes.Compare)):
            sides: list[Any] = [comparison, *comparison.ops]
            if not any(isinstance(side.expr, nodes.Const) for side in sides):  # what a literal equals is small
                for side in sides:
                    side.expr = _call_of("limited", side.expr)
        for pair in list(tree.find_all(nodes.Pair)):
            if not isinstance(pair.key, nodes.Const):  # a key that is a tuple is hashed, with all that it holds
                pair.key = _call_of("limited", pair.key)
        for block in list(tree.find_all(nodes.AssignBlock)):
            # Filters limit what they return, and a set block is the one text that passes none.
            block.filter = nodes.Filter(block.filter, "string", [], [], None, None)
        tree.set_environment(self)
        return Template.from_code(self, self.compile(tree), self.make_globals(None))

    def run(self, template: Template, variables: Mapping[str, Any]) -> str:
        """Render; raise BoundExceeded, TemplateRefusal, or whatever the template's own faults raise."""
        budget = _Budget(time.monotonic() + MAX_SECONDS)
        parts: list[str] = []
        size = 0
        for part in template.generate({**variables, _BUDGET: budget}):
            size += len(part)
            if size > MAX_SIZE:
                raise BoundExceeded(f"its output is longer than {MAX_SIZE} characters")
            parts.append(part)
        return "".join(parts)

    def tick(self) -> bool:
        """Nothing: that it is called is the point, as `call` counts."""
        return True

    def limited(self, value: Any) -> Any:
        """A side of a comparison, or a key: `call` limits what it is given."""
        return value

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Look up a key or an index."""
        return super().getitem(obj, _limit_tree(argument))

    def concatenate(self, *values: Any) -> str:
        """The `~` operator."""
        texts = [str(value) for value in values]
        _limit(sum(map(len, texts)))
        return "".join(texts)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Count a step, call, and limit what comes of it: macros make text as well."""
        context.parent[_BUDGET].spend()
        if getattr(obj, "__name__", "") in _SIZED_METHODS:
            _limit_all((*args, *kwargs.values()))
        if not isinstance(obj, _SHALLOW_CALLS):
            for value in (*args, *kwargs.values()):
                _limit_tree(value)
        result = super().call(context, obj, *args, **kwargs)
        _limit(len(result) if isinstance(result, str) else 0)
        return result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Refuse what grows too large, before it does."""
        if isinstance(left, int) and isinstance(right, int):
            if operator == "**":
                _limit(left.bit_length() * right, MAX_BITS)
            elif operator == "*":
                _limit(left.bit_length() + right.bit_length(), MAX_BITS)
        elif operator == "*":
            _limit(_length(left) * _length(right))
        elif operator == "+":
            _limit(_length(left) + _length(right))
        elif operator == "%":
            _limit_tree(right)
        return super().call_binop(context, operator, left, right)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        """Refuse at once. Jinja's own would print as an empty text."""
        raise SecurityError(f"attribute {attribute!r} of {type(obj).__name__!r} is not open to templates")


def _call_of(method: str, *args: nodes.Expr) -> nodes.Call:
    """An expression that calls a method of the environment."""
    return nodes.Call(nodes.EnvironmentAttribute(method), list(args), [], None, None)


def _length(value: Any) -> int:
    """Of a sequence; a whole number counts as itself, as it repeats one; anything else makes nothing large."""
    if isinstance(value, int):
        return value
    return len(value) if isinstance(value, str | list | tuple) else 0


def _limit(size: int, most: int = MAX_SIZE) -> None:
    if size > most:
        raise BoundExceeded(f"a value of size {size} is more than {most}")


def _limit_tree(value: Any) -> Any:
    """Return a value whose text is not too large, whatever it holds however often."""
    left, size, num_values = [value], 0, 0
    while left:
        one = left.pop()
        items = _items(one)
        size += len(one) if isinstance(one, str) else 0
        num_values += len(items)
        _limit(size)
        _limit(num_values, _MAX_VALUES)
        left += items
    return value


def _items(value: Any) -> Collection[Any]:
    """Return what a value holds and would write out, none for what is no list or table."""
    if isinstance(value, Context):  # Jinja's own argument of some filters
        return ()
    if isinstance(value, Mapping):
        return [*value, *value.values()]
    if isinstance(value, Namespace):
        return _items(object.__getattribute__(value, "_Namespace__attrs"))
    if isinstance(value, ItemsView):
        return [one for pair in value for one in pair]
    return value if isinstance(value, list | tuple | set | frozenset | KeysView | ValuesView) else ()


def _limit_all(values: tuple[Any, ...]) -> None:
    for value in values:
        if isinstance(value, int):
            _limit(value)


def _bounded(filter_: Callable[..., Any], *, sized: bool, shallow: bool) -> Callable[..., Any]:
    @wraps(filter_)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        if sized:
            _limit_all((*args, *kwargs.values()))
        if not shallow:
            # What a lazy filter yields is looked at as a list.
            args = tuple(list(value) if isinstance(value, Iterator) else value for value in args)
            for value in (*args, *kwargs.values()):
                _limit_tree(value)
        result = filter_(*args, **kwargs)
        _limit(len(result) if isinstance(result, str) else 0)
        return result

    return bounded


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """As Hugging Face has it: Jinja's own escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> None:
    raise TemplateRefusal(str(message))


def _strftime_now(form: str) -> str:
    """In local time, as Hugging Face has it."""
    return datetime.now().strftime(form)


class _Dict:
    """Makes dicts, as `dict` does. The type itself would hand out its methods."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)
