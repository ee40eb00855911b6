"""How a chat template takes messages, by its syntax.

Templates differ in what they take: content as text or as parts, null or nothing where there is no content, a tool
call's arguments as an object or as JSON text. No field of a checkpoint says which; the template's own code does.
"""

from __future__ import annotations

from collections.abc import Iterator

from attrs import frozen
from jinja2 import nodes

# Asked of arguments, these let a template take objects.
_ASKING = frozenset({"mapping", "string", "iterable"})


@frozen
class Conventions:
    """What the messages that a template gets look like.

    Attributes:
        takes_parts: content may be a list of parts: the template loops over it. Else it is text.
        asks_for_null: content that is not there is null: the template compares it with none. Else there is no such key.
        takes_argument_texts: arguments of tool calls are JSON text: the template puts them between other text as they
            are. Else they are objects.
    """

    takes_parts: bool = False
    asks_for_null: bool = False
    takes_argument_texts: bool = False

    @classmethod
    def of(cls, tree: nodes.Template) -> Conventions:
        """Read a parsed template."""
        return cls(
            takes_parts=any(_is_key(one, "content") for loop in tree.find_all(nodes.For) for one in _within(loop.iter)),
            asks_for_null=any(_is_key(one, "content") for one in _compared_with_none(tree)),
            takes_argument_texts=(
                any(_is_key(one, "arguments") for one in _put_between_texts(tree))
                and not any(_is_key(one, "arguments") for one in _taken_apart(tree))
            ),
        )


def _is_key(expression: nodes.Node, key: str) -> bool:
    """Whether it is `message.key`, `message['key']`, or a variable of that name."""
    match expression:
        case nodes.Name(name=name) | nodes.Getattr(attr=name) | nodes.Getitem(arg=nodes.Const(value=name)):
            return bool(name == key)
    return False


def _within(expression: nodes.Node) -> Iterator[nodes.Node]:
    """Yield what a filter or a slice is of: `message.content | selectattr(...)`, `content[1:]`."""
    yield expression
    match expression:
        case nodes.Filter(node=nodes.Node() as inner) | nodes.Getitem(node=inner, arg=nodes.Slice()):
            yield from _within(inner)


def _compared_with_none(tree: nodes.Template) -> Iterator[nodes.Node]:
    for test in tree.find_all(nodes.Test):
        if test.name == "none":
            yield test.node
    for comparison in tree.find_all(nodes.Compare):
        if any(isinstance(one.expr, nodes.Const) and one.expr.value is None for one in comparison.ops):
            yield comparison.expr


def _put_between_texts(tree: nodes.Template) -> Iterator[nodes.Node]:
    for output in tree.find_all(nodes.Output):
        yield from output.nodes
    for concatenation in tree.find_all(nodes.Concat):
        yield from concatenation.nodes
    for addition in tree.find_all(nodes.Add):
        yield from (addition.left, addition.right)


def _taken_apart(tree: nodes.Template) -> Iterator[nodes.Node]:
    for loop in tree.find_all(nodes.For):
        yield from _within(loop.iter)
    for test in tree.find_all(nodes.Test):
        if test.name in _ASKING:
            yield test.node
    for filtered in tree.find_all(nodes.Filter):
        if filtered.node is not None:
            yield filtered.node
    for attribute in tree.find_all(nodes.Getattr):
        yield attribute.node
    for item in tree.find_all(nodes.Getitem):
        yield item.node
