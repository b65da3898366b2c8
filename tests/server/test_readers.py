"""Readers of answers: the same whatever comes together, stops in visible text, tokens beside their text."""

import hypothesis
from hypothesis import strategies as st

from maxmoe.inference.answer import Step
from maxmoe.server.readers import ChatReader, TextReader
from tests.server.stub_engine import END_ID, TOKENIZER, call, ids_of, message

_PROMPT = ids_of('<|open|>message role="assistant"<|sep|><|open|>think<|sep|>')
_WHOLE = message("Ein Wörtchen é🚀 STOP danach", thinking="STOP? nein", calls=call("f", 1, a="STOP", b="ü"))


def _steps(ids):
    return [Step(token_id, -1.0, "stop" if token_id == END_ID else None) for token_id in ids]


def _read(reader, steps, sizes=()):
    """Everything a reader gives for steps that come in groups of these sizes, then one by one."""
    pieces, at = [], 0
    for size in [*sizes, *[1] * len(steps)]:
        pieces += reader.feed(steps[at : at + size])
        at += size
    rest, finished = reader.finish("stop")
    return pieces + rest, finished


def _joined(pieces, channel):
    return "".join(piece.value for piece in pieces if piece.channel == channel)


@hypothesis.given(st.lists(st.integers(1, 30), max_size=12), st.booleans())
def test_answer_does_not_depend_on_what_comes_together(sizes, stops):
    settings = {"stops": ("STOP",) if stops else (), "keeps_steps": True}
    pieces, finished = _read(ChatReader(TOKENIZER, _PROMPT, **settings), _steps(_WHOLE), sizes)
    _, alone = _read(ChatReader(TOKENIZER, _PROMPT, **settings), _steps(_WHOLE))
    assert finished == alone
    assert _joined(pieces, "content") == finished.message["content"]
    assert _joined(pieces, "reasoning_content") == finished.message["reasoning_content"] == "STOP? nein"


def test_stop_string_ends_visible_text_and_what_follows():
    reader = ChatReader(TOKENIZER, _PROMPT, stops=["STOP"])
    _, finished = _read(reader, _steps(_WHOLE))
    assert reader.done and finished.stop_string == "STOP" and finished.finish_reason == "stop"
    assert finished.message["content"] == "Ein Wörtchen é🚀 " and finished.message["tool_calls"] == []
    assert len(reader.ids) < len(_WHOLE)


def test_stop_string_does_not_count_within_the_first_tokens():
    steps = _steps(_WHOLE)
    _, finished = _read(ChatReader(TOKENIZER, _PROMPT, stops=["STOP"], min_tokens=len(steps)), steps)
    assert finished.stop_string is None and finished.message["content"].endswith("STOP danach")
    text = _steps(ids_of("a STOP b"))
    assert _read(TextReader(TOKENIZER, stops=["STOP"]), text)[1].message["content"] == "a "
    assert _read(TextReader(TOKENIZER, stops=["STOP"], min_tokens=6), text)[1].message["content"] == "a STOP b"


def test_tokens_after_the_message_are_not_read():
    ended = message("done")[:-1]  # the message is closed, and the model does not end its turn
    reader = ChatReader(TOKENIZER, _PROMPT)
    _, finished = _read(reader, _steps([*ended, *ids_of("<|open|>more")]))
    assert reader.done and finished.ids == ended and finished.message["content"] == "done"


def test_prompt_that_breaks_off_inside_a_tag_is_gone_on_with():
    for at in range(len(_PROMPT), len(_PROMPT) + len(message("b", thinking="a")) - 2):
        whole = [*_PROMPT, *message("b", thinking="a")]
        _, finished = _read(ChatReader(TOKENIZER, whole[:at]), _steps(whole[at:]))
        said = finished.message
        assert (said["reasoning_content"] or "") + (said["content"] or "") in ("ab", "b", "")


def test_end_of_turn_is_counted_and_is_no_text():
    reader = ChatReader(TOKENIZER, _PROMPT, keeps_steps=True)
    _, finished = _read(reader, _steps(message("é", thinking="t")))
    assert not reader.done and finished.ids[-1] == END_ID and reader.num_reasoning_tokens == 1
    assert [step.token_id for step in finished.steps] == ids_of("é")


def test_calls_beyond_the_limit_are_dropped_wherever_the_stream_is_cut():
    steps = _steps(message("", calls=call("f", 1, a="x") + call("f", 2, a="y")))
    for sizes in ((), (len(steps),)):
        reader = ChatReader(TOKENIZER, _PROMPT, max_calls=1)
        pieces, finished = _read(reader, steps, sizes)
        assert [c["function"]["arguments"] for c in finished.message["tool_calls"]] == ['{"a": "x"}']
        assert finished.finish_reason == "tool_calls" and reader.done
        assert {piece.value[0]["index"] for piece in pieces if piece.channel == "tool_calls"} == {0}
        assert finished.warnings == ()


def test_call_that_cannot_be_read_comes_with_a_warning():
    _, finished = _read(ChatReader(TOKENIZER, _PROMPT), _steps(message("", calls=call("", 1, a="x"))))
    assert finished.message["tool_calls"] == [] and "without a tool name" in finished.warnings[0]
