"""Conversations of a command: what flags and files ask for, how answers are shown, and that the history is kept."""

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from absl import flags
from absl.testing import flagsaver

from maxmoe import answer_report, chat, conversation, decode
from maxmoe.chat.tokenizer import ByteTokenizer
from maxmoe.chat.tools import Toolbox

_BYTES = ByteTokenizer(512)
_TINY_K3 = Path(__file__).parent / "golden/tiny_k3"  # without markers in its vocabulary
_USER = {"role": "user", "content": "q"}


@pytest.fixture
def given():
    """Sets the flags of decode, which are those of a conversation and others."""
    with flagsaver.flagsaver():
        yield lambda *arguments: flags.FLAGS(["decode", *arguments])


def _file(tmp_path, value) -> str:
    (tmp_path / "chat.json").write_text(json.dumps(value))
    return f"--messages={tmp_path / 'chat.json'}"


def test_prompt_alone_is_no_chat(given):
    given("--prompt=a")
    assert not conversation.is_asked_for()


@pytest.mark.parametrize("flag", ["--effort=low", "--system=s", "--messages=file", "--interactive"])
def test_each_flag_asks_for_a_chat(given, flag):
    given(flag)
    assert conversation.is_asked_for()


def test_request_is_system_then_file_then_prompt(given, tmp_path):
    given("--effort=high", "--system=s", _file(tmp_path, [_USER]))
    assert conversation.request_from_flags("p") == {
        "messages": [{"role": "system", "content": "s"}, _USER, {"role": "user", "content": "p"}],
        "reasoning_effort": "high",
    }


def test_effort_of_the_command_wins_over_the_file(given, tmp_path):
    tools = [{"type": "function", "function": {"name": "f"}}]
    given("--effort=none", _file(tmp_path, {"messages": [_USER], "thinking": True, "tools": tools}))
    assert conversation.request_from_flags("") == {"messages": [_USER], "tools": tools, "reasoning_effort": "none"}
    given("--effort=low", _file(tmp_path, {"messages": [_USER], "chat_template_kwargs": {"thinking": False}}))
    assert conversation.request_from_flags("") == {"messages": [_USER], "reasoning_effort": "low"}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("hi", "must hold a list of messages"),
        ({"messages": "hi"}, "must hold a list of messages"),
        ({"messages": [_USER], "temperature": 1}, "temperature does not belong to a conversation"),
        ([{"role": "system", "content": "t"}], "has a system message already"),
    ],
)
def test_file_that_is_no_conversation(given, tmp_path, content, says):
    given("--system=s", _file(tmp_path, content))
    with pytest.raises(ValueError, match=says):
        conversation.request_from_flags("")


def test_file_that_is_no_json(given, tmp_path):
    (tmp_path / "chat.json").write_bytes(b"[\xff")
    given(f"--messages={tmp_path / 'chat.json'}")
    with pytest.raises(ValueError, match="is not JSON in UTF-8"):
        conversation.request_from_flags("")


def test_flags_that_do_not_go_together(given):
    given("--effort=low")
    conversation.check_flags(resumes=False, is_alone=False)
    with pytest.raises(NotImplementedError, match="--resume_session"):
        conversation.check_flags(resumes=True, is_alone=True)
    given("--interactive")
    with pytest.raises(NotImplementedError, match="in one process"):
        conversation.check_flags(resumes=False, is_alone=False)


def _talk(messages, tell=lambda text: None, styled=False, **request):
    return conversation.Conversation({"messages": messages, **request}, _BYTES, 10_000, tell, styled)


_WHOLE = (
    "why\x1b<|close|>think<|sep|><|open|>response<|sep|>so\n<|close|>response<|sep|><|open|>tools<|sep|>"
    '<|open|>call tool="f" index="1"<|sep|><|open|>argument key="a" type="string"<|sep|>x<|close|>argument<|sep|>'
    "<|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>"
)
_TOOLS = [{"type": "function", "function": {"name": "f"}}]


def _shown(answer, text=_WHOLE) -> str:
    return "".join(answer.feed([i]) for i in _BYTES.encode(text, allow_special=True)) + answer.finish()


def test_answer_is_shown_without_its_thinking_where_a_program_reads():
    assert _shown(_talk([_USER], tools=_TOOLS).next_answer()) == 'so\n\nf {"a": "x"}'


def test_thinking_and_calls_are_dim_on_a_terminal_and_controls_are_pictures():
    shown = _shown(_talk([_USER], tools=_TOOLS, styled=True).next_answer())
    assert shown == '\x1b[2mwhy␛\x1b[0m\nso\n\x1b[2m\nf {"a": "x"}\x1b[0m\n'


def test_answer_that_only_thinks_ends_with_normal_letters():
    assert _shown(_talk([_USER], styled=True).next_answer(), "why") == "\x1b[2mwhy\x1b[0m\n"


def test_message_goes_into_the_history_with_its_thinking():
    talk = _talk([_USER], tools=_TOOLS)
    answer = talk.next_answer()
    ids = _BYTES.encode(_WHOLE, allow_special=True)
    answer.feed(ids)
    message, reason = answer.message("stop")
    assert reason == "tool_calls" and message["reasoning_content"] == "why\x1b"
    talk.add(message)
    talk.add({"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "r"})
    end = _BYTES.end_of_msg_id
    assert talk.next_answer().prompt_ids[: len(answer.prompt_ids) + len(ids) + 1] == [*answer.prompt_ids, *ids, end]


@pytest.mark.parametrize("reason", ["length", "interrupted"])
def test_answer_that_is_cut_off_says_why(reason):
    answer = _talk([_USER]).next_answer()
    answer.feed(_BYTES.encode("why"))
    message, said = answer.message(reason)
    assert said == reason and message["reasoning_content"] == "why" and message["content"] is None


def test_each_warning_is_told_once():
    told = []
    talk = _talk([_USER, {"role": "assistant", "content": "a"}, _USER], told.append)
    talk.next_answer()
    talk.next_answer()
    assert told == ["messages[1]: no reasoning_content: the model sees that it did not think"]


def test_conversation_longer_than_the_context_is_refused():
    talk = conversation.Conversation({"messages": [_USER]}, _BYTES, 100, print, False)
    with pytest.raises(chat.ContextOverflowError, match="max_len is 100"):
        talk.next_answer()


def test_interactive_takes_lines_until_the_input_ends(given, monkeypatch):
    given("--interactive")
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n \none\ntwo\n"))
    messages = [{"role": "system", "content": "s"}]
    talk = _talk(messages)
    assert messages[1:] == [{"role": "user", "content": "one"}], "the first question"
    assert talk.ask() and messages[-1]["content"] == "two"
    assert not talk.ask() and len(messages) == 3
    with pytest.raises(ValueError, match="before there was a question"):
        _talk([])


# --- tools that are run here


def _calling(name, arguments):
    function = {"name": name, "arguments": arguments}
    calls = [{"id": f"{name}_0", "type": "function", "function": function}]
    return {"role": "assistant", "reasoning_content": "r", "content": None, "tool_calls": calls}


_SIX_TIMES_SEVEN = _calling("calculator", '{"expression": "6 * 7"}')
_RESULT = {"role": "tool", "tool_call_id": "calculator_0", "content": "42"}


def test_tools_are_declared_beside_those_of_the_file(given, tmp_path):
    given("--tools=clock,calculator", _file(tmp_path, {"messages": [_USER], "tools": _TOOLS}))
    assert conversation.is_asked_for()
    names = [tool["function"]["name"] for tool in conversation.request_from_flags("")["tools"]]
    assert names == ["f", "clock", "calculator"]
    given("--tools=f")
    with pytest.raises(ValueError, match=r"--tools=f: no tool is named 'f'; there are calculator, clock"):
        conversation.check_flags(resumes=False, is_alone=True)
    clock = [{"type": "function", "function": {"name": "clock"}}]
    given("--tools=clock", _file(tmp_path, {"messages": [_USER], "tools": clock}))
    with pytest.raises(ValueError, match="has clock already"):
        conversation.request_from_flags("")
    with pytest.raises(NotImplementedError, match="runs in one process, and there are 2"):
        conversation.check_flags(resumes=False, is_alone=False, num_processes=2)


@pytest.mark.parametrize(("styled", "shown"), [(False, "\n-> 42\n"), (True, "\x1b[2m\n-> 42\x1b[0m\n")])
def test_calls_are_run_and_go_into_the_history(given, styled, shown):
    given("--tools=calculator")
    messages = [_USER]
    talk = _talk(messages, styled=styled)
    assert talk.run_tools(_SIX_TIMES_SEVEN) == shown
    assert talk.turn == messages[1:] == [_SIX_TIMES_SEVEN, _RESULT]


def test_calls_of_tools_elsewhere_are_not_run(given):
    given("--tools=calculator")
    messages = [_USER]
    assert _talk(messages, tools=_TOOLS).run_tools(_calling("f", "{}")) is None
    assert messages == [_USER]
    assert "no tool is named 'g'" in _talk(messages, tools=_TOOLS).run_tools(_calling("g", "{}"))


def test_no_call_is_run_that_nobody_asked_to_run(given):
    given("--effort=low")
    assert _talk([_USER]).run_tools(_SIX_TIMES_SEVEN) is None


def test_rounds_of_tools_end_and_begin_anew_with_a_question(given, monkeypatch):
    given("--tools=calculator", "--max_tool_rounds=2")
    told = []
    talk = _talk([_USER], told.append)
    assert [talk.run_tools(_SIX_TIMES_SEVEN) is None for _ in range(3)] == [False, False, True]
    assert told == ["the model calls tools again, after 2 times: --max_tool_rounds allows no more"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("more\n"))
    assert talk.ask() and talk.turn == []
    assert talk.run_tools(_SIX_TIMES_SEVEN) is not None


class _ScriptedEngine:
    """Says texts, one per prompt."""

    def __init__(self, talk, *texts):
        self._talk, self._texts, self.prompts = talk, list(texts), []

    def stream(self, prompt_ids, params):
        self.prompts.append(list(prompt_ids))
        return _ScriptedRun(self._talk.reader(), _BYTES.encode(self._texts.pop(0), allow_special=True))


class _ScriptedRun:
    def __init__(self, reader, ids):
        self._reader, self._ids = reader, ids

    def __iter__(self):
        for i in self._ids:
            yield SimpleNamespace(token_id=i, text=self._reader.feed([i]), is_stop_id=False, finish_reason=None)
        end = _BYTES.end_of_msg_id
        yield SimpleNamespace(token_id=end, text=self._reader.feed([end]), is_stop_id=True, finish_reason="stop")

    def finish_text(self):
        return self._reader.finish()

    def session(self):
        raise RuntimeError("none")


def test_model_that_calls_a_tool_answers_with_its_result(given):
    given("--tools=calculator", "--effort=low")
    talk = _talk(
        [_USER], **{key: value for key, value in conversation.request_from_flags("").items() if key != "messages"}
    )
    call = _WHOLE.replace('"f"', '"calculator"').replace('key="a"', 'key="expression"').replace(">x<", ">6 * 7<")
    answer = "<|close|>think<|sep|><|open|>response<|sep|>It is 42.<|close|>response<|sep|><|close|>message<|sep|>"
    engine = _ScriptedEngine(talk, call, answer)
    reader = talk.next_answer()
    run = engine.stream(reader.prompt_ids, None)
    report, written = answer_report.AnswerReport(num_prompt_tokens=1, seed=5), []
    answer_report.collect(run, report, written.append)
    report.message, report.finish_reason = reader.message(report.finish_reason)
    params = SimpleNamespace(seed=5)
    _, last = decode._go_on_talking(talk, engine, run, report, params, written.append)
    assert "".join(written) == 'so\n\ncalculator {"expression": "6 * 7"}\n-> 42\nIt is 42.'
    shown = json.loads(last.as_json())
    assert (shown["text"], shown["finish_reason"], shown["seed"]) == ("It is 42.", "stop", 5)
    roles = [message["role"] for message in shown["messages"]]
    assert roles == ["assistant", "tool", "assistant"] and shown["messages"][1]["content"] == "42"
    assert shown["messages"][0]["reasoning_content"] == "why\x1b"
    first, second = engine.prompts
    asked = [_USER, *shown["messages"][:2]]
    request = {"messages": asked, "tools": Toolbox.built_in(["calculator"]).declarations(), "reasoning_effort": "low"}
    assert second == chat.encode(request, _BYTES) and shown["num_prompt_tokens"] == len(second)
    assert second[: len(first)] == first


# --- going on from the state of the last answer


class _Engine:
    """Says what it is asked to do."""

    def stream(self, prompt_ids, params):
        return "stream", prompt_ids

    def resume(self, session, new_ids, params):
        return "resume", new_ids


def _run(ids):
    return SimpleNamespace(session=lambda: SimpleNamespace(token_ids=(np.array(ids, np.int32),)))


def test_go_on_reads_only_what_is_new_if_the_tokens_are_the_same():
    assert conversation.go_on(_Engine(), _run([1, 2]), [1, 2, 3, 4], None) == ("resume", [3, 4])
    for past in ([1, 3], [1, 2, 3, 4], [1, 2, 3, 4, 5]):
        assert conversation.go_on(_Engine(), _run(past), [1, 2, 3, 4], None) == ("stream", [1, 2, 3, 4])


def test_go_on_begins_anew_after_an_interrupt_without_a_state():
    def session():
        raise RuntimeError("no session")

    assert conversation.go_on(_Engine(), SimpleNamespace(session=session), [1], None) == ("stream", [1])


# --- the command


def _decode(capsys, *arguments) -> tuple[int, str, str]:
    with flagsaver.flagsaver():
        code = decode.main(
            flags.FLAGS(["decode", "--effort=none", "--temperature=0", "--seed=3", "--max_tokens=4", *arguments])
        )
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_decode_answers_a_chat(capsys, monkeypatch, tmp_path):
    code, out, error = _decode(capsys, _file(tmp_path, [_USER]), "--json")
    assert code == 0, error
    answer = json.loads(out)
    request = {"messages": [_USER], "thinking": False}
    assert answer["num_prompt_tokens"] == len(chat.encode(request, _BYTES))
    assert answer["message"]["role"] == "assistant" and answer["finish_reason"] == "length"
    monkeypatch.setattr(sys, "stdin", io.StringIO("q\nand\n"))
    code, out, error = _decode(capsys, "--interactive")
    assert code == 0 and out.count("ended by length, seed 3]") == 2, error
    messages = [_USER, answer["message"], {"role": "user", "content": "and"}]
    num_tokens = len(chat.encode({"messages": messages, "thinking": False}, _BYTES))
    assert f"[{num_tokens} prompt tokens, 4 new tokens" in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--prompt="], "messages is empty"),
        (["--messages=no/such/file"], "no/such/file"),
        (["--system=s"], "give --prompt TEXT"),
        (["--prompt=q", "--tools=search"], "no tool is named 'search'; there are calculator, clock"),
        (["--interactive", "--json"], "talks with a person"),
        (["--prompt=q", "--resume_session=x"], "leave it out, or the flags of a chat"),
        (["--prompt=q", "--max_len=20"], "max_len is 20"),
        (["--prompt=q", f"--checkpoint={_TINY_K3}"], "cannot hold a chat"),
    ],
)
def test_mistake_is_one_message_and_exit_code_2(capsys, arguments, says):
    code, out, error = _decode(capsys, *arguments)
    assert code == 2 and out == "" and says in error and "Traceback" not in error
