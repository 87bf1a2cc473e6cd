"""Stop strings across the borders of tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvanta import InputError, SamplingParams
from kvanta.params.sampling_params import MAX_STOPS
from kvanta.text.stop_strings import StopAutomaton, StopStrings

letters = st.text("ab", max_size=12)
stop_lists = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3)


def run(pieces: list[str], stops: list[str], *, include: bool = False) -> tuple[list[str], str | None]:
    finder = StopStrings(stops, include)
    shown = []
    for piece in pieces:
        shown.append(finder.add(piece))
        if finder.found is not None:
            return shown, finder.found
    shown.append(finder.add("", final=True))
    return shown, finder.found


def earliest_end(text: str, stops: list[str]) -> tuple[int, str] | None:
    """By brute force: the first prefix of `text` that ends with a stop string, and the longest such."""
    for end in range(len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            return end, max(hits, key=len)
    return None


@given(letters, stop_lists)
def test_one_character_at_a_time_equals_brute_force(text: str, stops: list[str]) -> None:
    shown, found = run(list(text), stops)
    expected = earliest_end(text, stops)
    if expected is None:
        assert (found, "".join(shown)) == (None, text)
    else:
        end, stop = expected
        assert found == stop
        assert "".join(shown) == text[: end - len(stop)]


@given(st.lists(letters, max_size=4), stop_lists)
def test_the_cut_does_not_matter(pieces: list[str], stops: list[str]) -> None:
    whole, found = run(list("".join(pieces)), stops)
    cut, cut_found = run(pieces, stops)
    assert cut_found == found
    assert "".join(cut) == "".join(whole)


@given(letters, stop_lists)
def test_nothing_that_belongs_to_a_stop_string_is_ever_shown(text: str, stops: list[str]) -> None:
    shown, found = run(list(text), stops)
    if found is not None:
        assert not any(stop in "".join(shown) for stop in stops)


def test_text_is_held_only_while_it_may_become_a_stop_string() -> None:
    finder = StopStrings(["</s>"])
    assert finder.add("a<") == "a"
    assert finder.add("/") == ""
    assert finder.add("b") == "</b"
    assert finder.add("<", final=True) == "<"
    assert finder.found is None


def test_the_stop_string_can_be_kept() -> None:
    assert "".join(run(["abc", "def"], ["cd"], include=True)[0]) == "abcd"
    assert "".join(run(["abc", "def"], ["cd"])[0]) == "ab"
    finder = StopStrings(["cd"])
    finder.add("abcd")
    assert finder.add("more") == ""


def test_every_character_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many stop strings there are, and however much of them has come."""
    automaton = StopAutomaton(["a" * 1023 + chr(0x100 + index) for index in range(MAX_STOPS)])
    steps = 0
    step = StopAutomaton.step

    def counted(self: StopAutomaton, state: int, character: str) -> int:
        nonlocal steps
        steps += 1
        return step(self, state, character)

    monkeypatch.setattr(StopAutomaton, "step", counted)
    finder = StopStrings(automaton)
    shown = "".join(finder.add("a") for _ in range(3000))
    assert shown == "a" * (3000 - 1023)
    assert steps == 3000
    assert finder.add(chr(0x105) + "b") == ""
    assert finder.found == "a" * 1023 + chr(0x105)
    assert steps == 3001


@given(st.text("abc", max_size=40), st.lists(st.text("abc", min_size=1, max_size=6), min_size=1, max_size=MAX_STOPS))
def test_many_stop_strings_equal_brute_force(text: str, stops: list[str]) -> None:
    expected = earliest_end(text, stops)
    _, found = run([text[:7], text[7:20], text[20:]], stops)
    assert found == (expected and expected[1])


@pytest.mark.parametrize(
    ("stop", "said"),
    [
        (["x"] * (MAX_STOPS + 1), f"stop must have at most {MAX_STOPS} texts, got {MAX_STOPS + 1}"),
        ("x" * 1025, "stop must have texts of at most 1024 characters, got one of 1025"),
    ],
)
def test_number_and_length_are_limited(stop: object, said: str) -> None:
    with pytest.raises(InputError, match=f"^{said}$"):
        SamplingParams(stop=stop)  # type: ignore[arg-type]
    SamplingParams(stop=["x" * 1024] * MAX_STOPS)
