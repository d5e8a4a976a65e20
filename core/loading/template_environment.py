"""The jinja2 environment of chat templates: the usual helpers, and `Budget` woven into what it compiles."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import wraps
from typing import Any, cast

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import FILTERS
from jinja2.nodes import EvalContext
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import pass_eval_context
from jinja2.visitor import NodeTransformer

from octavo.core.loading.template_guard import Budget

__all__ = ["Refusal", "TemplateEnvironment"]

_STEP, _CONCAT, _MADE = "__octavo_step__", "__octavo_concat__", "__octavo_made__"

_SHARING_FILTERS = frozenset(
    ["attr", "count", "d", "default", "dictsort", "first", "groupby", "items", "last", "length", "list", "map", "max", "min",
     "reject", "rejectattr", "reverse", "select", "selectattr", "sort", "unique"]
)  # fmt: skip
"""Filters whose results refer to their input's items and copy none of them."""
_COPYING_FILTERS = frozenset(
    ["abs", "capitalize", "e", "escape", "float", "int", "lower", "round", "safe", "string", "title", "trim", "truncate",
     "upper", "wordcount"]
)  # fmt: skip
"""Filters that make a text at most a few times as long as their input's."""
_STRING_METHODS = frozenset(
    ["capitalize", "casefold", "count", "endswith", "find", "index", "isalnum", "isalpha", "isdecimal", "isdigit", "islower",
     "isnumeric", "isspace", "istitle", "isupper", "join", "lower", "lstrip", "partition", "removeprefix", "removesuffix",
     "replace", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "split", "splitlines", "startswith", "strip", "swapcase",
     "title", "upper"]
)  # fmt: skip
_GROWTH = 6  # the most that escaping or a change of case lengthens a text


class Refusal(Exception):
    """The template called ``raise_exception``."""


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox; what templates make is charged to ``budget``."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self, budget: Budget) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            autoescape=False,
            extensions=[_Generation, loopcontrols],
            finalize=budget.charged,
        )
        self._budget = budget
        self.globals = {
            **{name: self.globals[name] for name in ("namespace", "dict", "range", "cycler", "joiner")},
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
            _STEP: budget.step,
            _CONCAT: budget.joined,
            _MADE: budget.charged,
        }
        self.filters = _filters(budget)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Weaver().visit(super()._parse(source, name, filename))
        return tree

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str) and attr not in _STRING_METHODS:
            return False
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if super().wrap_str_format(value) is None:
            return None
        raise SecurityError("str.format isn't available in chat templates; use ~ or %")

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self._budget.check_operands(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - as in jinja2
        if getattr(__obj, "__self__", None) is not __self._budget:
            __self._budget.step()
            if getattr(__obj, "__name__", "") == "join" and args:
                args = (list(args[0]), *args[1:])  # a generator can be counted only once
            __self._check_method(__obj, args, kwargs)
        return super().call(__context, __obj, *args, **kwargs)

    def _check_method(self, method: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if not isinstance(owner, str):
            self._budget.charged([*args, *kwargs.values()])
        elif name == "replace" and len(args) >= 2:
            self._budget.check_replace(owner, args[0], args[1])
        elif name == "join" and args:
            self._budget.check_join(args[0], owner)
        else:
            self._budget.charge(_GROWTH * len(owner))


class _Weaver(NodeTransformer):
    """Puts a step at the head of every loop and macro; has literals, slices and ``~`` pay for what they make."""

    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        node = super().generic_visit(node, *args, **kwargs)
        if isinstance(node, (nodes.For, nodes.Macro, nodes.CallBlock)):
            chars = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
            step = _call(_STEP, [nodes.Const(chars, lineno=node.lineno)], node)
            node.body.insert(0, nodes.ExprStmt(step, lineno=node.lineno))
        elif isinstance(node, nodes.Concat):
            return _call(_CONCAT, node.nodes, node)
        elif _makes_container(node) or (isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)):
            return _call(_MADE, [cast(nodes.Expr, node)], node)
        return node


def _makes_container(node: nodes.Node) -> bool:
    """A literal; a tuple that is assigned to is none."""
    return isinstance(node, (nodes.List, nodes.Dict)) or (isinstance(node, nodes.Tuple) and node.ctx == "load")


def _call(function: str, args: list[nodes.Expr], where: nodes.Node) -> nodes.Call:
    name = nodes.Name(function, "load", lineno=where.lineno)
    return nodes.Call(name, args, [], None, None, lineno=where.lineno)


class _Generation(Extension):
    """``{% generation %}`` marks the assistant's words for training; for a prompt it means nothing."""

    tags = {"generation"}  # noqa: RUF012 - declared so by jinja2

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _filters(budget: Budget) -> dict[str, Callable[..., Any]]:
    """The filters that exist in a template, each paying before it runs."""

    def sharing(args: tuple[Any, ...]) -> None:
        budget.charge(sum(len(value) for value in args if hasattr(value, "__len__")))

    def copying(args: tuple[Any, ...]) -> None:
        budget.charged([value for value in args if not isinstance(value, (EvalContext, Context))] * _GROWTH)

    filters = {name: _paying(FILTERS[name], sharing) for name in _SHARING_FILTERS}
    filters |= {name: _paying(FILTERS[name], copying) for name in _COPYING_FILTERS}

    @pass_eval_context
    def replace(context: EvalContext, text: Any, old: str, new: str, count: int | None = None) -> Any:
        budget.check_replace(text, old, new)
        return FILTERS["replace"](context, text, old, new, count)

    @pass_eval_context
    def join(context: EvalContext, value: Any, d: str = "", attribute: str | int | None = None) -> Any:
        items = list(value)
        budget.check_join(items, d)
        return FILTERS["join"](context, items, d, attribute)

    def indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> Any:
        budget.check_indent(text, width)
        return FILTERS["indent"](text, width, first, blank)

    def formatted(text: str, *args: Any, **kwargs: Any) -> Any:
        budget.check_format(str(text), *args, *kwargs.values())
        return FILTERS["format"](text, *args, **kwargs)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """JSON as models were trained on it: not escaped for HTML, as jinja2's own filter does."""
        budget.charged([value] * _GROWTH)
        budget.check_indent("", indent or 0)
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def total(value: Any, start: float = 0) -> float:
        items = list(value)
        if not all(isinstance(item, (int, float)) for item in items):
            raise SecurityError("sum adds numbers only")
        return sum(items, start)

    return {**filters, "sum": total, "replace": replace, "join": join, "indent": indent, "format": formatted, "tojson": tojson}


def _paying(function: Callable[..., Any], pay: Callable[[tuple[Any, ...]], None]) -> Callable[..., Any]:
    @wraps(function)  # carries jinja2's marks for what it passes along
    def paid(*args: Any, **kwargs: Any) -> Any:
        pay((*args, *kwargs.values()))
        return function(*args, **kwargs)

    return paid


def _raise_exception(message: object) -> None:
    raise Refusal(str(message)[:500])


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(str(format)[:100])
