"""Stop strings: the first completed one ends the text, whichever way the text is split."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from intarsia.text import StopStrings

_TEXT = st.text("ab", max_size=20)
_STOPS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)


def _run(stops: StopStrings, parts: list[str]) -> tuple[list[str], bool]:
    deltas = []
    for part in parts:
        delta, stopped = stops.push(part)
        deltas.append(delta)
        if stopped:
            return deltas, True
    return [*deltas, stops.finish()], False


def _reference(text: str, stops: list[str], include: bool) -> tuple[str, bool]:
    """By definition: go through all beginnings of the text; the shortest that ends with a stop string decides."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end if include else end - max(map(len, ending))], True
    return text, False


@settings(max_examples=1000)
@given(text=_TEXT, stops=_STOPS, include=st.booleans(), cuts=st.lists(st.integers(0, 20)))
def test_the_result_is_the_definitions_however_the_text_is_split(text, stops, include, cuts):
    bounds = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    parts = [text[a:b] for a, b in pairwise(bounds)]
    deltas, stopped = _run(StopStrings(stops, include), parts)
    assert ("".join(deltas), stopped) == _reference(text, stops, include)


@settings(max_examples=500)
@given(text=_TEXT, stops=_STOPS)
def test_no_more_is_held_back_than_may_be_the_beginning_of_a_stop_string(text, stops):
    looking, shown = StopStrings(stops), ""
    for end, character in enumerate(text, start=1):
        delta, stopped = looking.push(character)
        shown += delta
        if stopped:
            return
        held = text[len(shown) : end]
        assert shown + held == text[:end]
        longest = max((n for stop in stops for n in range(len(stop)) if text[:end].endswith(stop[:n])), default=0)
        assert len(held) == longest


@pytest.mark.parametrize("order", [1, -1])
def test_the_earliest_match_wins_whatever_the_order_of_the_stop_strings(order):
    assert _run(StopStrings(["GH", "DE", "I"][::order]), ["ABCDEFGHI"]) == (["ABC"], True)
    assert _run(StopStrings(["CDE", "E"][::order]), ["ABCDEFGHI"]) == (["AB"], True)


def test_text_after_the_stop_string_is_dropped_and_the_stop_string_kept_only_if_asked():
    assert _run(StopStrings(["\n\n"]), ["one\n", "\ntwo"]) == (["one", ""], True)
    assert _run(StopStrings(["\n\n"], include_stop=True), ["one\n", "\ntwo"]) == (["one", "\n\n"], True)


def test_held_back_text_comes_out_when_it_is_no_stop_string():
    assert _run(StopStrings(["aab"]), ["x", "a", "a", "a", "c", "aa"]) == (["x", "", "", "a", "aac", "", "aa"], False)


def test_asking_whether_a_text_completes_a_stop_string_changes_nothing():
    looking = StopStrings(["END"])
    looking.push("xE")
    assert looking.completed_by("ND")
    assert not looking.completed_by("N")
    assert looking.push("ND") == ("", True)


def test_a_long_stop_string_costs_no_more_than_linear_time():
    looking = StopStrings(["a" * 20_000 + "b"])
    start = time.perf_counter()
    for _ in range(2_000):
        looking.push("a" * 20)
    assert time.perf_counter() - start < 2
    assert looking.push("b") == ("", True)
