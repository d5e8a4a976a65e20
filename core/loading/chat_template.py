"""Chat templates: jinja2 in its immutable sandbox, with bounds on the work a template may do and on what it may make.

The sandbox keeps a template from reaching Python; it doesn't keep one from looping for ever, or from doubling a string until
memory is gone. So the compiled template counts its rounds and pays for what it makes (`template_guard`), and only filters and
string methods whose results can be bounded beforehand exist in it.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from octavo.core.api.errors import BrokenModel, UsageError
from octavo.core.loading.template_environment import Refusal, TemplateEnvironment
from octavo.core.loading.template_guard import Budget, BudgetExceeded

__all__ = ["ChatTemplate"]

_MAX_TEMPLATE_CHARS = 1 << 20
_PLAIN_PROMPT = "give a plain prompt (--raw)"


class ChatTemplate:
    """A compiled template. Raises `BrokenModel` when it isn't one."""

    def __init__(self, source: str) -> None:
        if len(source) > _MAX_TEMPLATE_CHARS:
            raise BrokenModel(f"the chat template has {len(source)} characters; at most {_MAX_TEMPLATE_CHARS} are accepted")
        self._budget = Budget()
        self._lock = threading.Lock()  # the budget is this object's, and requests come from several threads
        try:
            self._template = TemplateEnvironment(self._budget).from_string(source)
        except (jinja2.TemplateError, RecursionError, SyntaxError, ValueError, MemoryError) as error:
            # Python's own parser may refuse what jinja2 made of the template: too deep, too many nested blocks.
            what = str(error) or type(error).__name__
            raise BrokenModel(f"the model's chat template is broken: {what[:300]}", hint=_PLAIN_PROMPT) from None

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool, **variables: Any) -> str:
        """The prompt for ``messages``.

        Raises `UsageError` when the template refuses them, fails on them, or takes too much time or memory over them.
        """
        given = {"messages": [dict(message) for message in messages], "add_generation_prompt": add_generation_prompt}
        with self._lock:
            self._budget.restart()
            try:
                return self._template.render({**given, **variables})
            except Refusal as error:
                raise UsageError(f"the model's chat template refuses these messages: {error}") from None
            except BudgetExceeded as error:
                raise UsageError(f"the model's chat template was stopped: {error}", hint=_PLAIN_PROMPT) from None
            except (
                jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError,
                ValueError,
            ) as error:  # fmt: skip
                what = str(error) or type(error).__name__
                raise UsageError(f"the model's chat template fails on these messages: {what[:300]}") from None
