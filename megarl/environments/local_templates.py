"""Chat templates that write each message by itself, so that what follows a turn can be read off a shorter chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Final

from jinja2 import Environment, TemplateSyntaxError, nodes

from megarl.data.tokenizer import Message

_FORBIDDEN: Final = (nodes.Import, nodes.FromImport, nodes.Include, nodes.Extends, nodes.Block, nodes.Break)
_LAZY: Final = ("map", "select", "reject", "selectattr", "rejectattr", "batch", "slice", "unique", "items", "reverse")
"""Filters whose result can be read once."""
_STATEFUL: Final = ("messages", "cycler", "joiner")
_LAST_QUERIES: Final[Mapping[str, str]] = {
    "last_query_index": (
        "{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}"
        "{%- for message in messages[::-1] %}{%- set index = (messages|length - 1) - loop.index0 %}"
        "{%- if ns.multi_step_tool and message.role == 'user' and message.content is string"
        " and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}"
        "{%- set ns.multi_step_tool = false %}{%- set ns.last_query_index = index %}{%- endif %}{%- endfor %}"
    ),
    "last_user_index": (
        "{%- set ns = namespace(last_user_index=-1) %}{%- for m in messages %}{%- if m.role == 'user' %}"
        "{%- set ns.last_user_index = loop.index0 %}{%- endif %}{%- endfor %}"
    ),
}
"""How templates of Qwen 3 and of GLM-4.5 find the last message of the user, by the attribute of `ns` that has it."""
_AFTER_QUERY: Final = "whether a message comes after the last one of the user"
_OUTSIDE = "outside of loops"
_OF_MESSAGES = "in the loop over the messages"
_INSIDE = "in another loop or a macro"


def writes_locally(template: object, *, after_query: bool = False) -> bool:
    """Returns whether it is proved that a template writes each message by itself.

    What it writes for a message then follows from the message, its two neighbours, whether it is the first or the last,
    and what does not change: the first message, the tools and the arguments. That holds where one loop goes over the
    messages, and the template reads them in no other way than `messages[0]` and, in the loop, those before and after
    the loop's own, and carries nothing from one to the next: attributes of namespaces outlive the body of a loop, and
    objects that change when they are read. Transformers forbids methods that change lists and dicts.

    Args:
        after_query: what is written for a message may also depend on whether it comes after the last one of the user,
            if the template finds that as Qwen 3's or GLM-4.5's do.
    """
    return isinstance(template, str) and _writes_locally(template, after_query)


@lru_cache(maxsize=16)
def _writes_locally(template: str, after_query: bool) -> bool:
    try:
        tree = _parsed(template)
    except TemplateSyntaxError:  # also with the extensions of transformers, which this parser lacks
        return False
    if after_query and not _without_query(tree):
        return False
    loops = [loop for loop in tree.find_all(nodes.For) if _is(loop.iter, "messages")]
    return len(loops) == 1 and _local(tree, _OUTSIDE)


def shortened(chat: Sequence[Message]) -> Sequence[Message]:
    """Returns a chat after which a local template writes what it writes after the whole one.

    The last message keeps the one before it, and the first message those next to it: `messages[-1]` may be one.
    """
    return [*chat[:2], *chat[-2:]] if len(chat) > 4 else chat


def shortened_to_query(chat: Sequence[Message], following: Sequence[Message]) -> Sequence[Message]:
    """Returns what `shortened` does, for a template that is local with `after_query`.

    The last message of the user stays, and those after it where another one follows: they are then written as ones
    before it. Where it may be the answer of a tool, all messages stay.
    """
    query = next((index for index in reversed(range(len(chat))) if chat[index]["role"] == "user"), None)
    if len(chat) < 5 or query is None or "<tool_response>" in str(chat[query].get("content")):
        return chat
    first = len(chat) - 2
    if any(message["role"] == "user" for message in following):
        first = min(query, first)
    return [chat[index] for index in sorted({0, 1, query, *range(first, len(chat))})]


def _parsed(template: str) -> nodes.Template:
    """Parses a template as transformers does."""
    return Environment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]).parse(template)


def _without_query(tree: nodes.Template) -> bool:
    """Removes what finds the last message of the user, and names the comparisons with it; False if it is not there."""
    for name, source in _LAST_QUERIES.items():
        found = _parsed(source).body
        index = nodes.Getattr(nodes.Name("ns", "load"), name, "load")
        for start in range(len(tree.body)):
            if tree.body[start : start + len(found)] == found:
                del tree.body[start : start + len(found)]
                for compared in tree.find_all(nodes.Operand):
                    if compared.op == "gt" and compared.expr == index:
                        compared.expr = nodes.Name(_AFTER_QUERY, "load")
                return not any(other.name == "ns" for other in tree.find_all((nodes.Name, nodes.NSRef)))
    return False


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
            query = place == _OF_MESSAGES and _is(node.ops[0].expr, _AFTER_QUERY)
            return len(node.ops) == 1 and (query or node.ops[0].expr == nodes.Const(0))
        case nodes.Name(name=name) if name == _AFTER_QUERY:
            return False
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
