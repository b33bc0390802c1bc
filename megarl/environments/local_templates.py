"""Chat templates that write each message by itself, so that what follows a turn can be read off a shorter chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from jinja2 import Environment, TemplateSyntaxError, nodes

from megarl.data.tokenizer import Message

_FORBIDDEN: Final = (nodes.Import, nodes.FromImport, nodes.Include, nodes.Extends, nodes.Block, nodes.Break)
_LAZY: Final = ("map", "select", "reject", "selectattr", "rejectattr", "batch", "slice", "unique", "items", "reverse")
"""Filters whose result can be read once."""
_STATEFUL: Final = ("messages", "cycler", "joiner")
_OUTSIDE, _OF_MESSAGES, _INSIDE = "outside of loops", "in the loop over the messages", "in another loop or a macro"


def writes_locally(template: object) -> bool:
    """Returns whether it is proved that a template writes each message by itself.

    What it writes for a message then follows from the message, its two neighbours, whether it is the first or the last,
    and what does not change: the first message, the tools and the arguments. That holds where one loop goes over the
    messages, and the template reads them in no other way than `messages[0]` and, in the loop, those before and after
    the loop's own, and carries nothing from one to the next: attributes of namespaces outlive the body of a loop, and
    objects that change when they are read. Transformers forbids methods that change lists and dicts.
    """
    if not isinstance(template, str):
        return False
    try:
        tree = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(template)
    except TemplateSyntaxError:  # also with the extensions of transformers, which this parser lacks
        return False
    loops = [loop for loop in tree.find_all(nodes.For) if _is(loop.iter, "messages")]
    return len(loops) == 1 and _local(tree, _OUTSIDE)


def shortened(chat: Sequence[Message]) -> Sequence[Message]:
    """Returns a chat after which a local template writes what it writes after the whole one.

    The last message keeps the one before it, and the first message those next to it: `messages[-1]` may be one.
    """
    return [*chat[:2], *chat[-2:]] if len(chat) > 4 else chat


def _local(node: nodes.Node, place: str) -> bool:
    match node:
        case nodes.For(iter=nodes.Name(name="messages")):
            carries = node.test is not None or node.recursive or node.find(nodes.NSRef) is not None
            return place == _OUTSIDE and not carries and _all_local([*node.body, *node.else_], _OF_MESSAGES)
        case nodes.For():
            return _local(node.iter, place) and _all_local(
                [*node.body, *node.else_, *([] if node.test is None else [node.test])], _INSIDE
            )
        case nodes.Macro():
            return node.find(nodes.NSRef) is None and _all_local([*node.defaults, *node.body], _INSIDE)
        case nodes.Getitem(node=nodes.Name(name="messages")):
            return node.arg == nodes.Const(0) or (place == _OF_MESSAGES and _is_neighbour(node.arg))
        case nodes.Getattr(node=nodes.Name(name="loop")) if place == _OF_MESSAGES:
            return node.attr in ("first", "last", "previtem", "nextitem")
        case nodes.Compare(expr=nodes.Getattr(node=nodes.Name(name="loop"), attr="index0")):
            return [operand.expr for operand in node.ops] == [nodes.Const(0)]
        case nodes.Name() if node.name in _STATEFUL:
            return False
        case nodes.Filter() if node.name in _LAZY and place != _OF_MESSAGES:
            return False
        case nodes.Name(name="loop"):
            return place != _OF_MESSAGES
        case nodes.Template() | nodes.If():
            return _all_local(list(node.iter_child_nodes()), place)
        case _:  # some take what is written in them
            inside = _INSIDE if place == _OUTSIDE else place
            return not isinstance(node, _FORBIDDEN) and _all_local(list(node.iter_child_nodes()), inside)


def _all_local(children: Sequence[nodes.Node], place: str) -> bool:
    return all(_local(child, place) for child in children)


def _is(node: nodes.Node, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.name == name


def _is_neighbour(index: nodes.Node) -> bool:
    """Returns whether an index is `loop.index0 - 1` or `loop.index0 + 1`."""
    if not isinstance(index, nodes.Sub | nodes.Add) or index.right != nodes.Const(1):
        return False
    return isinstance(index.left, nodes.Getattr) and _is(index.left.node, "loop") and index.left.attr == "index0"
