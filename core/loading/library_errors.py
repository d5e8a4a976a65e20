"""Errors of the `tokenizers` library, which has no types of its own for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from octavo.core.api.errors import BrokenModel

__all__ = ["refused_by_library"]


@contextmanager
def refused_by_library(what: str) -> Iterator[None]:
    """Turns what the library raises for data that it refuses into `BrokenModel`.

    It raises bare `Exception`, and, where its Rust code panics, a `BaseException` named PanicException that can't be imported.
    """
    try:
        yield
    except Exception as error:  # noqa: BLE001 - the library raises nothing narrower
        raise BrokenModel(f"{what}: {str(error)[:200]}", hint="fetch it again") from None
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise BrokenModel(f"{what}: the tokenizers library gave up on it", hint="fetch it again") from None
