from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelane.engine.http.stop_strings import StopStrings

# Few letters, so that stop strings overlap, repeat and hide in one another.
_stops = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4).map(tuple)


def cut(text: str, stops: tuple[str, ...]) -> str:
    """The rule by definition: cut at the match that is complete first, the longest of those."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))]
    return text


@given(text=st.text("abc", max_size=30), stops=_stops, data=st.data())
def test_any_split_gives_the_text_cut_at_the_first_match(
    text: str, stops: tuple[str, ...], data: st.DataObject
) -> None:
    expected = cut(text, stops)
    matcher = StopStrings(stops)
    shown, rest = "", text
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        shown += matcher.feed(rest[:size])
        rest = rest[size:]
        assert expected.startswith(shown), "shown text was taken back"
    if matcher.hit is None:
        shown += matcher.finish()
    assert shown == expected
    assert (matcher.hit is not None) == any(stop in text for stop in stops)


@given(text=st.text("abc", max_size=30), stops=_stops)
def test_holds_back_no_more_than_what_may_become_a_stop_string(text: str, stops: tuple[str, ...]) -> None:
    matcher = StopStrings(stops)
    shown = "".join(map(matcher.feed, text))
    if matcher.hit is None:
        held = text[len(shown) :]
        longest = max(
            (text[i:] for i in range(len(text)) if any(s.startswith(text[i:]) for s in stops)), key=len, default=""
        )
        assert held == longest


def test_shows_nothing_after_a_hit() -> None:
    matcher = StopStrings(("stop",))
    assert matcher.feed("go stop more") == "go "
    assert matcher.hit == "stop"
    assert matcher.feed("again") == ""
    assert matcher.finish() == ""


def test_without_stop_strings_everything_passes() -> None:
    matcher = StopStrings(())
    assert matcher.feed("anything") == "anything"
    assert matcher.finish() == ""


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStrings(("a", ""))
