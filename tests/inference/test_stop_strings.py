"""Stop strings: found however text is cut, nothing of them passed on, nothing else held back."""

import hypothesis
import pytest
from hypothesis import strategies as st

from maxmoe.chat.tokenizer import ByteTokenizer, StreamDecoder
from maxmoe.inference.stop_strings import StoppableText, StopStrings


def _by_definition(text, stops):
    """What passes, and the string: the first that ends, the longest of those that end together."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


def _held(text, stops):
    sizes = [size for stop in stops for size in range(1, len(stop)) if text.endswith(stop[:size])]
    return max(sizes, default=0)


@hypothesis.settings(max_examples=300, deadline=None)
@hypothesis.given(
    pieces=st.lists(st.text("ab\n", max_size=4), max_size=10),
    stops=st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=4),
)
def test_feed_equals_the_definition_however_text_is_cut(pieces, stops):
    finder, text, passed = StopStrings(stops), "", ""
    for piece in pieces:
        text += piece
        passed += finder.feed(piece)
        expected, matched = _by_definition(text, stops)
        assert finder.matched == matched
        assert passed == (expected if matched else text[: len(text) - _held(text, stops)])
    assert passed + finder.finish() == _by_definition(text, stops)[0]


def test_stop_across_tokens_and_bytes_of_a_character():
    text = StoppableText(StreamDecoder(ByteTokenizer(512)), ["🚀!"])
    passed = [text.feed(byte) for byte in "go 🚀?🚀!x".encode()]
    assert "".join(passed) + text.finish() == "go 🚀?" and text.stop_string == "🚀!"
    assert passed[:3] == ["g", "o", " "]


def test_finish_gives_what_was_held_or_incomplete():
    text = StoppableText(StreamDecoder(ByteTokenizer(512)), ["end"])
    passed = "".join(text.feed(byte) for byte in b"the en\xf0")
    assert passed == "the " and text.finish() == "en\N{REPLACEMENT CHARACTER}" and text.stop_string is None


ENDS = [(0, "x"), (2, "x"), (3, "xa"), (4, "xaba"), (5, "xaba"), (6, "xabaa"), (7, "xabaab"), (8, "xabaabab")]


@pytest.mark.parametrize(("min_tokens", "expected"), ENDS)
def test_min_tokens_lets_strings_that_end_earlier_pass(min_tokens, expected):
    text = StoppableText(StreamDecoder(ByteTokenizer(512)), ["ab", "ba"], min_tokens)
    assert "".join(text.feed(byte) for byte in b"xabaabab") + text.finish() == expected


def test_empty_string_is_refused():
    with pytest.raises(ValueError, match="empty"):
        StopStrings(["a", ""])
