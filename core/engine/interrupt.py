"""Ctrl-C between steps, not in the middle of one: half a step would leave scheduler and workers at odds."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["interrupt_deferred"]


@contextmanager
def interrupt_deferred() -> Iterator[None]:
    """A `KeyboardInterrupt` that comes inside is raised at the end; a second one at once.

    Only where Python's own handler is in place, on the main thread; anything else is left as it is.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    came = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal came
        if came:
            raise KeyboardInterrupt
        came = True

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if came:
        raise KeyboardInterrupt
