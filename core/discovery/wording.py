"""What vendors' code says, made fit for one line of a message. Nothing in here raises, whatever the text or the error is."""

from __future__ import annotations

LONGEST = 500
"""Characters that are kept of what a plugin said; the traceback has the rest."""


def one_line(text: str) -> str:
    """``text`` without line breaks, control characters and what can't be encoded, shortened to `LONGEST`."""
    line = " ".join("".join(letter if letter.isprintable() else " " for letter in text[: 4 * LONGEST]).split())
    return line if len(line) <= LONGEST else line[: LONGEST - 1] + "…"


def error_text(error: BaseException) -> str:
    """``OSError: libacme.so.2: no such file``; the kind alone where there is nothing more or it can't be said."""
    name = type(error).__name__
    try:
        text = one_line(str(error))
    except Exception:  # noqa: BLE001 - a vendor's own __str__
        return f"{name} (its text can't be shown)"
    return f"{name}: {text}" if text else name


def first_cause(error: BaseException) -> BaseException:
    """Where the chain of causes and contexts begins; a chain that bites its own tail is followed once around."""
    seen = {id(error)}
    cause = error
    while True:
        before = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
        if before is None or id(before) in seen:
            return cause
        seen.add(id(before))
        cause = before
