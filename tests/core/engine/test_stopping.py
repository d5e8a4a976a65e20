"""Stop strings are found whatever the token boundaries, and no part of one is ever shown."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from octavo.core.engine.stopping import StopStrings

STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=3)


def feed(stops: StopStrings, pieces: list[str]) -> tuple[str, str | None, list[str]]:
    """The text before the stop, the stop, and what was shown after each piece."""
    text, shown = "", []
    for piece in pieces:
        text += piece
        match = stops.find(text, len(piece))
        if match:
            return text[: match.start], match.string, shown
        shown.append(text[: len(text) - stops.num_held(text)])
    return text, None, shown


@given(stops=STOPS, pieces=st.lists(st.text(alphabet="abc", max_size=6), max_size=8))
def test_the_result_does_not_depend_on_how_the_text_is_cut(stops: list[str], pieces: list[str]) -> None:
    whole = feed(StopStrings(stops), list("".join(pieces)))
    assert feed(StopStrings(stops), pieces)[:2] == whole[:2]


@given(stops=STOPS, pieces=st.lists(st.text(alphabet="abc", max_size=6), max_size=8))
def test_the_first_stop_to_end_wins_and_nothing_of_it_was_shown(stops: list[str], pieces: list[str]) -> None:
    text = "".join(pieces)
    before, found, shown = feed(StopStrings(stops), pieces)
    ends = [end for end in range(len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)]
    if not ends:
        assert (before, found) == (text, None)
    else:
        longest = max((stop for stop in stops if text[: ends[0]].endswith(stop)), key=len)
        assert (before + longest, found) == (text[: ends[0]], longest)
    assert all(before.startswith(part) for part in shown)


@given(stops=STOPS, text=st.text(alphabet="abcx", max_size=10))
def test_no_more_is_held_back_than_may_become_a_stop(stops: list[str], text: str) -> None:
    held = StopStrings(stops).num_held(text)
    tails = [n for n in range(1, len(text) + 1) if any(len(s) > n and s.startswith(text[-n:]) for s in stops)]
    assert held == max(tails, default=0)


def test_without_stop_strings_nothing_is_found_or_held() -> None:
    stops = StopStrings(())
    assert stops.find("anything", 8) is None
    assert stops.num_held("anything") == 0
