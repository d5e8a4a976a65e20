"""Chat templates: jinja2 in its immutable sandbox, with bounds on the work a template may do and the text it may make.

The sandbox keeps a template from reaching Python; it doesn't keep one from looping for ever or from doubling a string until
memory is gone. So every loop and every macro counts its rounds, and every operation that can make something much larger than
its operands is checked before it runs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from octavo.core.api.errors import BrokenModel, UsageError
from octavo.core.loading.template_guard import Budget, BudgetExceeded, check_call, check_operands, joined

__all__ = ["ChatTemplate"]

_MAX_TEMPLATE_CHARS = 1 << 20
_TICK, _CONCAT = "__octavo_tick__", "__octavo_concat__"


class _Refusal(Exception):
    """The template called ``raise_exception``."""


class ChatTemplate:
    """A compiled template. Raises `BrokenModel` when it isn't one."""

    def __init__(self, source: str) -> None:
        if len(source) > _MAX_TEMPLATE_CHARS:
            raise BrokenModel(f"the chat template has {len(source)} characters; at most {_MAX_TEMPLATE_CHARS} are accepted")
        self._budget = Budget()
        environment = _Environment(self._budget)
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError, SyntaxError, ValueError, MemoryError) as error:
            # Python's own parser may refuse what jinja2 made of the template: too deep, too many nested blocks.
            raise BrokenModel(f"the model's chat template is broken: {error}", hint="give a plain prompt (--raw)") from None

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool, **variables: Any) -> str:
        """The prompt for ``messages``.

        Raises `UsageError` when the template refuses them, or finds in them what it can't use, or takes too long over them.
        """
        # Plain copies: a template sees nothing but JSON's types.
        variables = {
            "messages": [dict(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
        } | variables
        self._budget.restart()
        parts: list[str] = []
        try:
            for part in self._template.generate(**variables):
                self._budget.spend_output(len(part))
                parts.append(part)
        except _Refusal as error:
            raise UsageError(f"the model's chat template refuses these messages: {error}") from None
        except BudgetExceeded as error:
            raise UsageError(f"the model's chat template was stopped: {error}", hint="give a plain prompt (--raw)") from None
        except jinja2.TemplateError as error:
            raise UsageError(f"the model's chat template fails on these messages: {error}") from None
        except (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError) as error:
            what = f"{type(error).__name__}: {error}"
            raise UsageError(f"the model's chat template fails on these messages: {what}") from None
        return "".join(parts)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox with templates' usual helpers, and `Budget` checks woven into what it compiles."""

    intercepted_binops = frozenset(["+", "*", "**", "%", "//", "/"])

    def __init__(self, budget: Budget) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, autoescape=False, extensions=[_Generation, loopcontrols])
        self._budget = budget
        self.globals = {
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
            "namespace": self.globals["namespace"],
            "dict": dict,
            "range": self.globals["range"],
            "cycler": self.globals["cycler"],
            "joiner": self.globals["joiner"],
            _TICK: budget.spend_step,
            _CONCAT: joined,
        }
        self.filters = {name: _guarded_filter(function) for name, function in self.filters.items()}
        self.filters["tojson"] = _to_json

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        return _Weaver().visit(tree)  # type: ignore[no-any-return]

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        check_operands(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - jinja2's own signature
        check_call(__obj, args, kwargs)
        return super().call(__context, __obj, *args, **kwargs)


class _Weaver(NodeTransformer):
    """Puts a budget check at the head of every loop and macro, and routes ``~`` through one."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        return self._ticking(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._ticking(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._ticking(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return nodes.Call(nodes.Name(_CONCAT, "load"), node.nodes, [], None, None, lineno=node.lineno)

    def _ticking(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        tick = nodes.Call(nodes.Name(_TICK, "load"), [], [], None, None, lineno=node.lineno)
        node.body.insert(0, nodes.ExprStmt(tick, lineno=node.lineno))
        return node  # type: ignore[no-any-return]


class _Generation(Extension):
    """``{% generation %}`` marks the assistant's words for training; for a prompt it means nothing."""

    tags = {"generation"}  # noqa: RUF012 - declared so by jinja2

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _guarded_filter(function: Callable[..., Any]) -> Callable[..., Any]:
    from functools import wraps

    @wraps(function)  # carries jinja2's pass_context marks along
    def guarded(*args: Any, **kwargs: Any) -> Any:
        check_call(function, args, kwargs)
        return function(*args, **kwargs)

    return guarded


def _raise_exception(message: object) -> None:
    raise _Refusal(str(message)[:500])


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models were trained on it: not escaped for HTML, as jinja2's own filter does."""
    check_call(_to_json, (), {"indent": indent})
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
