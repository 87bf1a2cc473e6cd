"""Jinja's sandbox with a budget: it keeps a template from the machine, not from taking all of its time and memory.

Counted are the rounds of loops, calls, and the characters of every text that an operator, a filter, a method or the
output makes; what could be large is estimated before it is made. A step may be slow, so time is limited as well.
Nothing is evaluated while a template is compiled.
"""

from __future__ import annotations

import itertools
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range
from jinja2.utils import Namespace, missing
from jinja2.visitor import NodeTransformer

from kvanta.text.template_budget import STEPS_AT_ONCE, allocate, spend, text_length
from kvanta.text.template_checks import (
    FILTERS,
    METHODS,
    Check,
    apply_check,
    check_entries,
    check_operator,
    check_same_size,
    size,
)

# First arguments that filters ask for, by the name of the jinja2.pass_* decorator.
_PASSED: Mapping[str, Callable[[Context], Any]] = {
    "context": lambda context: context,
    "eval_context": lambda context: context.eval_ctx,
    "environment": lambda context: context.environment,
}


def _checked(call: Callable[..., Any], check: Check | None) -> Callable[..., Any]:
    """A filter with a check in front."""
    passed = _PASSED.get(getattr(getattr(call, "jinja_pass_arg", None), "name", ""))

    @jinja2.pass_context
    def checked(context: Context, value: Any = "", *arguments: Any, **named: Any) -> Any:
        if check is not None:
            apply_check(check, value, arguments, named)
        if passed is not None:
            return call(passed(context), value, *arguments, **named)
        return call(value, *arguments, **named)

    return checked


class _CountedLoop:
    """The values of a loop, whose rounds are counted before each few of them."""

    def __init__(self, values: Sized) -> None:
        self._values = values

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[Any]:
        return itertools.chain.from_iterable(self._parts())

    def _parts(self) -> Iterator[Iterator[Any]]:
        values = iter(self._values)  # type: ignore[call-overload]
        for begin in range(0, len(self._values), STEPS_AT_ONCE):
            rounds = min(STEPS_AT_ONCE, len(self._values) - begin)
            spend(rounds)
            yield itertools.islice(values, rounds)


def _counted_one_by_one(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        spend(1)
        yield value


@jinja2.pass_context
def _counted(_: Context, values: Any) -> Iterable[Any]:
    return _CountedLoop(values) if isinstance(values, Sized) else _counted_one_by_one(values)


@jinja2.pass_context
def _sized(_: Context, value: Any) -> Any:
    """A collection that a template writes, or a part of one or of a text."""
    check_same_size(value)
    return value


@jinja2.pass_context
def _concatenated(_: Context, values: list[Any]) -> str:
    allocate(sum(map(text_length, values)))
    return "".join(map(str, values))


_TEXT = {str}


@jinja2.pass_context
def _added(_: Context, values: list[Any]) -> Any:
    """A sum; that of texts is made at once."""
    if set(map(type, values)) == _TEXT:
        allocate(sum(map(len, values)))
        return "".join(values)
    total = values[0]
    for value in itertools.islice(values, 1, None):
        allocate(size(total) + size(value))
        total = total + value
    return total


@jinja2.pass_context
def _finalize(_: Context, value: Any) -> Any:
    """Counts everything that is written; that it needs the context keeps it from being evaluated early."""
    allocate(len(value) if type(value) is str else text_length(value))
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

    def visit_Add(self, node: nodes.Add) -> nodes.Filter:  # noqa: N802  (Jinja finds it by the class of the node)
        terms: list[nodes.Expr] = [node.right]
        while isinstance(node.left, nodes.Add):
            node = node.left
            terms.append(node.right)
        terms.append(node.left)
        return nodes.Filter(nodes.List([self.visit(term) for term in reversed(terms)]), "added", [], [], None, None)

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


def _dropped(values: dict[str, Any], name: str) -> tuple[int, int]:
    """References to a text that is taken away, and its length; no text: (0, 0)."""
    old = values.pop(name, None)
    return (sys.getrefcount(old), len(old)) if isinstance(old, str) else (0, 0)


_LAST_REFERENCE = _dropped({"": "".join(["a", "b"])}, "")[0]


class _Namespace(Namespace):
    """A namespace in which a text can grow: what its older states took counts no longer, if nothing else has them."""

    def __setitem__(self, name: str, value: Any) -> None:
        values = object.__getattribute__(self, _VALUES)
        references, length = _dropped(values, name)
        if references == _LAST_REFERENCE:
            allocate(-length)
        values[name] = value


_VALUES = "_Namespace__attrs"
# Attributes that the sandbox allows, and those of a dictionary, which come before its keys.
_NAMES_OF_DICT = frozenset(dir(dict))
_DICT_METHODS = frozenset({"get", "items", "keys", "values"})
_TEXT_METHODS = frozenset(name for name in dir(str) if name[0] != "_") - {"format", "format_map"}
_OF_LOOP = frozenset(name for name in dir(LoopContext) if name[0] != "_")
_VARIABLES = frozenset({"_loop_vars", "_block_vars"})  # which Jinja gives every call


class Sandbox(ImmutableSandboxedEnvironment):
    """An environment whose templates need `begin_budget` before each rendering."""

    intercepted_binops = frozenset({"*", "%", "**"})

    def __init__(self, **named: Any) -> None:
        """`named`: as for jinja2.Environment."""
        super().__init__(optimized=False, finalize=_finalize, **named)
        self.globals["range"] = _range
        self.globals["namespace"] = _Namespace
        del self.globals["lipsum"]  # texts without a limit, which no chat needs
        for name, call in list(self.filters.items()):
            self.add_filter(name, call)
        self.filters["counted"] = _counted
        self.filters["concatenated"] = _concatenated
        self.filters["added"] = _added
        self.filters["sized"] = _sized

    def add_filter(self, name: str, call: Callable[..., Any]) -> None:
        """Adds a filter, with its check."""
        self.filters[name] = _checked(call, FILTERS.get(name))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        rewritten = _Rewriter().visit(template)
        rewritten.set_environment(self)
        return rewritten  # type: ignore[no-any-return]

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Rewritten operators of a template."""
        check_operator(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, target: Any, *arguments: Any, **named: Any) -> Any:
        """Rewritten calls of a template."""
        spend(1)
        kind = type(target)
        if kind is types.BuiltinMethodType:
            owner, name = target.__self__, target.__name__
            given = {each: value for each, value in named.items() if each not in _VARIABLES} if named else named
            if isinstance(owner, (str, bytes)):
                check = METHODS.get(name)
                if check is not None:
                    apply_check(check, owner, arguments, given)
                if type(owner) is str:
                    return target(*arguments, **given)
            elif name == "copy":
                check_entries(owner)
        elif kind is types.FunctionType:
            formatted = getattr(getattr(target, "__wrapped__", None), "__self__", None)  # the sandbox wraps format
            if isinstance(formatted, str):
                given = {each: value for each, value in named.items() if each not in _VARIABLES}
                apply_check(METHODS[target.__name__], formatted, arguments, given)
        elif kind is LoopContext and arguments:  # a recursive loop goes down
            arguments = (_counted(context, arguments[0]), *arguments[1:])
        elif target is dict:
            check_entries(arguments[0] if arguments else named)
        return super().call(context, target, *arguments, **named)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """A value of a dictionary, without the exception that Jinja takes on its way there."""
        kind = type(obj)
        if kind is dict:
            if attribute not in _NAMES_OF_DICT:
                value = obj.get(attribute, missing)
                return self.undefined(obj=obj, name=attribute) if value is missing else value
            if attribute in _DICT_METHODS:
                return getattr(obj, attribute)
        elif kind is _Namespace:
            value = object.__getattribute__(obj, _VALUES).get(attribute, missing)
            if value is not missing and type(value) is not types.BuiltinMethodType and attribute[0] != "_":
                return value
        elif (kind is str and attribute in _TEXT_METHODS) or (kind is LoopContext and attribute in _OF_LOOP):
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """As `getattr`."""
        if type(obj) is dict and type(argument) is str and argument not in _NAMES_OF_DICT:
            value = obj.get(argument, missing)
            return self.undefined(obj=obj, name=argument) if value is missing else value
        return super().getitem(obj, argument)
