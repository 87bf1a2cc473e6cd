"""Jinja's sandbox with a budget: it keeps a template from the machine, not from taking all of its time and memory.

Counted are the rounds of loops, calls, and the characters of every text that an operator, a filter, a method or the
output makes; what could be large is estimated before it is made. A step may be slow, so time is limited as well.
Nothing is evaluated while a template is compiled.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range
from jinja2.visitor import NodeTransformer

from kvanta.text.template_budget import ENTRY, allocate, spend, text_length

_MOST_BITS = 2**16  # of a number
_MOST_WIDTH = 10_000  # of a column, an indentation, a group

# Widths of five digits, of another field's value, or of an argument.
_WIDE_FORMAT = re.compile(r"%(?:\([^)]*\))?[-+ #0]*\d*\.?(?:\d{5}|\*)|\{[^{}]*:[^{}]*(?:\d{5}|\{)")


def _size(value: object) -> int:
    if isinstance(value, str):
        return len(value)
    return ENTRY * len(value) if isinstance(value, (list, tuple, Mapping)) else 0


def _bits(value: object) -> int:
    return value.bit_length() if isinstance(value, int) else 0


def _check_operator(operator: str, left: Any, right: Any) -> None:
    if operator == "+":
        allocate(_size(left) + _size(right))
    elif operator == "*":
        if isinstance(left, int) and isinstance(right, int):
            _check_bits(_bits(left) + _bits(right))
        elif isinstance(left, int) or isinstance(right, int):
            times, text = (left, right) if isinstance(left, int) else (right, left)
            allocate(_size(text) * max(0, times))
    elif operator == "**":
        if isinstance(left, int) and isinstance(right, int):
            _check_bits(_bits(left) * max(0, right))
    elif isinstance(left, str):
        _check_format(left, right)


def _check_bits(bits: int) -> None:
    if bits > _MOST_BITS:
        raise jinja2.TemplateError(f"it makes a number of more than {_MOST_BITS} bits")


def _check_format(layout: str, values: Any) -> None:
    if _WIDE_FORMAT.search(layout):
        raise jinja2.TemplateError("it formats a text with a width of five digits, or of another value")
    fields = layout.count("%") + layout.count("{")
    allocate(len(layout) + fields * (text_length(values) + _MOST_WIDTH))


def _check_width(*values: Any) -> None:
    for value in values:
        if isinstance(value, int) and abs(value) > _MOST_WIDTH:
            raise jinja2.TemplateError(f"it uses a width of {value}; at most {_MOST_WIDTH} is allowed")


def _check_replacement(text: Any, old: Any, new: Any) -> None:
    if isinstance(text, str) and isinstance(old, str):
        allocate(len(text) + text.count(old) * text_length(new))


def _check_join(separator: Any, values: Any) -> None:
    entries = len(values) if hasattr(values, "__len__") else 0
    allocate(text_length(values) + entries * text_length(separator))


def _check_lines(text: Any, width: Any) -> None:
    """Every line, or every tab or character of it, grows."""
    _check_width(width)
    grows = width if isinstance(width, int) else text_length(width)
    if isinstance(text, str):
        allocate(len(text) + (text.count("\n") + text.count("\t") + 1) * max(0, grows))


def _check_translation(text: Any, table: Any) -> None:
    longest = max(map(text_length, table.values()), default=0) if isinstance(table, Mapping) else 1
    allocate(text_length(text) * max(1, longest))


def _whole(value: Any, *arguments: Any) -> None:
    _check_width(*arguments)
    allocate(text_length(value) + sum(map(text_length, arguments)))


def _entries(value: Any, *_: Any) -> None:
    """A list of the parts of a text, or of the entries of another collection."""
    if isinstance(value, Sized):
        allocate(ENTRY * len(value))


def _same(value: Any, *_: Any) -> None:
    """A text or a list as long as this one."""
    allocate(_size(value))


def _groups(value: Any, *arguments: Any) -> None:
    """The entries in lists that are filled up to a width."""
    _check_width(*arguments)
    allocate(ENTRY * sum(each for each in arguments if isinstance(each, int)))
    _entries(value)


def _padded(value: Any, *arguments: Any) -> None:
    _check_width(*arguments)
    allocate(text_length(value) + _MOST_WIDTH)


Check = Callable[..., None]


# check(value, *arguments), before a filter is applied or a method of a text is called.
def _to_json(value: Any, *_: Any, indent: int | None = 0) -> None:
    _check_width(indent)
    allocate(text_length(value) * (2 + (indent or 0)))


_FILTERS: Mapping[str, Check] = {
    "batch": _groups,
    "capitalize": _same,
    "center": _padded,
    "dictsort": _entries,
    "escape": lambda value: allocate(6 * text_length(value)),
    "e": lambda value: allocate(6 * text_length(value)),
    "forceescape": lambda value: allocate(6 * text_length(value)),
    "format": lambda layout, *values: _check_format(str(layout), values),
    "groupby": _entries,
    "indent": lambda value, width=4, *_: _check_lines(value, width),
    "join": lambda values, separator="", *_: _check_join(separator, values),
    "list": _entries,
    "lower": _same,
    "pprint": lambda value: allocate(4 * text_length(value)),
    "replace": lambda value, old="", new="", *_: _check_replacement(value, old, new),
    "reverse": _same,
    "slice": _groups,
    "sort": _entries,
    "string": _whole,
    "striptags": _entries,
    "sum": lambda values, *_: allocate(text_length(values)),
    "title": _entries,
    "tojson": _to_json,
    "trim": _same,
    "upper": _same,
    "urlencode": lambda value: allocate(6 * text_length(value)),
    "urlize": lambda value, *arguments: allocate(
        8 * (text_length(value) + 64) * (1 + sum(map(text_length, arguments)))
    ),
    "wordcount": _entries,
    "wordwrap": lambda value, *arguments: allocate(text_length(value) * (2 + sum(map(text_length, arguments)))),
    "xmlattr": lambda value, *_: allocate(8 * text_length(value)),
}
_METHODS: Mapping[str, Check] = {
    **dict.fromkeys(
        (
            *("capitalize", "casefold", "encode", "lower", "lstrip", "partition", "removeprefix", "removesuffix"),
            *("rpartition", "rstrip", "strip", "swapcase", "title", "upper"),
        ),
        _same,
    ),
    "center": _padded,
    "expandtabs": lambda value, width=8: _check_lines(value, width),
    "format": lambda layout, *values: _check_format(layout, values),
    "format_map": _check_format,
    "join": _check_join,
    "ljust": _padded,
    "replace": lambda value, old="", new="", *_: _check_replacement(value, old, new),
    "rjust": _padded,
    "rsplit": _entries,
    "split": _entries,
    "splitlines": _entries,
    "translate": _check_translation,
    "zfill": _padded,
}


def _checked(call: Callable[..., Any], check: Check | None) -> Callable[..., Any]:
    """A filter with a check in front."""
    passed = getattr(call, "jinja_pass_arg", None)

    @jinja2.pass_context
    def checked(context: Context, value: Any = "", *arguments: Any, **named: Any) -> Any:
        if check is not None:
            _apply(check, value, arguments, named)
        match getattr(passed, "name", ""):
            case "context":
                return call(context, value, *arguments, **named)
            case "eval_context":
                return call(context.eval_ctx, value, *arguments, **named)
            case "environment":
                return call(context.environment, value, *arguments, **named)
        return call(value, *arguments, **named)

    return checked


def _apply(check: Check, value: Any, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
    indent = {"indent": named["indent"]} if check is _FILTERS["tojson"] and "indent" in named else {}
    others = [each for name, each in named.items() if name not in indent]
    try:
        check(value, *arguments, *others, **indent)
    except TypeError:  # arguments that the filter refuses as well
        _whole(value, *arguments, *named.values())


@jinja2.pass_context
def _counted(_: Context, values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        spend(1)
        yield value


@jinja2.pass_context
def _sized(_: Context, value: Any) -> Any:
    """A collection that a template writes, or a part of one or of a text."""
    _same(value)
    return value


@jinja2.pass_context
def _concatenated(_: Context, values: list[Any]) -> str:
    allocate(sum(map(text_length, values)))
    return "".join(map(str, values))


@jinja2.pass_context
def _finalize(_: Context, value: Any) -> Any:
    """Counts everything that is written; that it needs the context keeps it from being evaluated early."""
    allocate(text_length(value))
    return value


def _range(*arguments: int) -> range:
    numbers = safe_range(*arguments)
    spend(len(numbers))
    return numbers


class _Rewriter(NodeTransformer):
    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802  (Jinja finds it by the class of the node)
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, "counted", [], [], None, None)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:  # noqa: N802  (Jinja finds it by the class of the node)
        self.generic_visit(node)
        return nodes.Filter(nodes.List(node.nodes), "concatenated", [], [], None, None)

    def visit_List(self, node: nodes.List) -> nodes.Filter:  # noqa: N802  (Jinja finds it by the class of the node)
        self.generic_visit(node)
        return nodes.Filter(node, "sized", [], [], None, None)

    visit_Dict = visit_List  # noqa: N815

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:  # noqa: N802  (Jinja finds it by the class of the node)
        self.generic_visit(node)
        return nodes.Filter(node, "sized", [], [], None, None) if isinstance(node.arg, nodes.Slice) else node

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:  # noqa: N802  (Jinja finds it by the class of the node)
        self.generic_visit(node)
        return nodes.Filter(node, "sized", [], [], None, None) if node.ctx == "load" else node

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Const:  # noqa: N802  (Jinja finds it by the class of the node)
        """Written text is counted like any other."""
        return nodes.Const(node.data)


class Sandbox(ImmutableSandboxedEnvironment):
    """An environment whose templates need `begin_budget` before each rendering."""

    intercepted_binops = frozenset({"+", "*", "%", "**"})

    def __init__(self, **named: Any) -> None:
        """`named`: as for jinja2.Environment."""
        super().__init__(optimized=False, finalize=_finalize, **named)
        self.globals["range"] = _range
        del self.globals["lipsum"]  # texts without a limit, which no chat needs
        for name, call in list(self.filters.items()):
            self.add_filter(name, call)
        self.filters["counted"] = _counted
        self.filters["concatenated"] = _concatenated
        self.filters["sized"] = _sized

    def add_filter(self, name: str, call: Callable[..., Any]) -> None:
        """Adds a filter, with its check."""
        self.filters[name] = _checked(call, _FILTERS.get(name))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        rewritten = _Rewriter().visit(template)
        rewritten.set_environment(self)
        return rewritten  # type: ignore[no-any-return]

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Rewritten operators of a template."""
        _check_operator(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, target: Any, *arguments: Any, **named: Any) -> Any:
        """Rewritten calls of a template."""
        spend(1)
        if isinstance(target, LoopContext) and arguments:  # a recursive loop goes down
            arguments = (_counted(context, arguments[0]), *arguments[1:])
        check = _METHODS.get(getattr(target, "__name__", ""))
        owner = getattr(getattr(target, "__wrapped__", target), "__self__", None)  # the sandbox wraps format
        if check is not None and isinstance(owner, (str, bytes)):
            _apply(check, owner, arguments, named)
        elif target is dict or getattr(target, "__name__", "") == "copy":
            _entries(owner if target is not dict else arguments[0] if arguments else named)
        return super().call(context, target, *arguments, **named)
