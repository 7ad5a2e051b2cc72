# SPDX-License-Identifier: Apache-2.0
"""Claim: answers end at stop ids, stop strings and limits, and no text that belongs to a stop string is shown."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from mmjax.engine.detokenizer import Detokenizer
from mmjax.engine.stop import StopChecker
from mmjax.sampling_params import SamplingParams

EOS = 0


class _Pieces:
    """A tokenizer whose token i+1 is the i-th of the given pieces; token 0 has no text."""

    def __init__(self, pieces):
        self.pieces = ["", *pieces]

    def decode(self, ids, **_):
        return "".join(self.pieces[i] for i in ids)


def _run(pieces, *, room=99, tail=(EOS,), **knobs):
    """Feeds the pieces and then `tail` until the answer ends; (emitted pieces, finish_reason, stop_reason)."""
    checker = StopChecker(SamplingParams(**knobs), Detokenizer(_Pieces(pieces)), (EOS,), room)
    emitted = []
    for token in [*range(1, len(pieces) + 1), *tail]:
        result = checker.add(token)
        emitted.append(result.text)
        if result.finish_reason:
            return emitted, result.finish_reason, result.stop_reason
    return emitted, None, None


def test_end_of_sequence_ends_with_stop():
    assert _run(["a", "b"]) == (["a", "b", ""], "stop", EOS)


def test_ignore_eos_goes_on_to_the_limit():
    assert _run(["a"], tail=(EOS, 1, 1), ignore_eos=True, max_tokens=3) == (["a", "", "a"], "length", None)


def test_a_stop_id_ends_without_its_text():
    assert _run(["a", "b", "c"], stop_token_ids=[2]) == (["a", ""], "stop", 2)


def test_limits_are_counted_in_tokens_and_stop_wins_over_length():
    assert _run(["a", "b", "c"], max_tokens=2) == (["a", "b"], "length", None)
    assert _run(["a", "b", "c"], room=1, max_tokens=None) == (["a"], "length", None)
    assert _run(["a", "b"], max_tokens=3) == (["a", "b", ""], "stop", EOS)
    assert _run(["a", "b!"], max_tokens=2, stop="!") == (["a", "b"], "stop", "!")


def test_a_stop_string_across_tokens_is_held_back_and_cut():
    assert _run(["one <", "en", "d> two"], stop="<end>") == (["one ", "", ""], "stop", "<end>")
    assert _run(["one <", "en", "try> two"], stop="<end>")[0] == ["one ", "", "<entry> two", ""]


def test_held_text_is_shown_when_the_answer_ends_otherwise():
    assert _run(["a", "<e"], stop="<end>") == (["a", "", "<e"], "stop", EOS)
    assert _run(["a", "<e"], stop="<end>", max_tokens=2) == (["a", "<e"], "length", None)


def test_a_cancelled_answer_gives_up_what_it_held_once():
    checker = StopChecker(SamplingParams(stop="<end>"), Detokenizer(_Pieces(["a<e"])), (EOS,), 9)
    assert checker.add(1).text == "a"
    assert checker.flush() == "<e"
    assert checker.flush() == ""


def test_min_tokens_keeps_ids_and_strings_from_ending_the_answer():
    assert _run(["x!", "y", "z"], stop="!", min_tokens=2) == (["x!", "y", "z", ""], "stop", EOS)
    assert _run(["x", "y!", "z"], stop="!", min_tokens=2) == (["x", "y"], "stop", "!")
    assert _run(["x", "y"], tail=(1, 2), stop_token_ids=[1], min_tokens=1) == (["x", "y", ""], "stop", 1)
    assert _run(["x!", "y"], stop=["!", "zz"], min_tokens=2) == (["x!", "y", ""], "stop", EOS)
    # one that begins too early and is completed in time counts
    assert _run(["x<", ">y"], stop="<>", min_tokens=2) == (["x", ""], "stop", "<>")


def test_an_early_stop_string_inside_held_text_stays_allowed():
    assert _run(["ab", "x", "abc"], stop=["ab", "abx!"], min_tokens=3) == (["", "", "abx"], "stop", "ab")


def test_text_held_for_a_half_character_is_searched_at_the_end():
    checker = StopChecker(SamplingParams(stop="\ufffd"), Detokenizer(_Pieces(["a\ufffd"])), (EOS,), 9)
    assert checker.add(1) == ("a", None, None)
    assert checker.add(EOS) == ("", "stop", "\ufffd")


def _reference(text: str, stops: list[str]) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        ending = [s for s in stops if text[:end].endswith(s)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


@settings(deadline=None, max_examples=300)
@given(
    pieces=st.lists(st.text("abc", max_size=4), max_size=12),
    stops=st.lists(st.text("abc", min_size=1, max_size=5), max_size=3),
)
def test_the_answer_does_not_depend_on_token_boundaries(pieces, stops):
    emitted, reason, stop_reason = _run(pieces, stop=stops)
    text, stop = _reference("".join(pieces), stops)
    assert "".join(emitted) == text
    assert (reason, stop_reason) == ("stop", EOS if stop is None else stop)


@settings(deadline=None, max_examples=200)
@given(
    pieces=st.lists(st.text("abc", max_size=4), max_size=12),
    stops=st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=3),
)
def test_nothing_shown_is_taken_back_and_nothing_is_held_in_vain(pieces, stops):
    """After each token, the shown text misses exactly the longest end that may still become a stop string."""
    checker = StopChecker(SamplingParams(stop=stops), Detokenizer(_Pieces(pieces)), (EOS,), 99)
    shown = full = ""
    for token, piece in enumerate(pieces, start=1):
        result = checker.add(token)
        shown, full = shown + result.text, full + piece
        if result.finish_reason:
            break
        undecided = [n for n in range(len(full) + 1) if any(len(s) > n and full.endswith(s[:n]) for s in stops)]
        assert shown == full[: len(full) - max(undecided)]
