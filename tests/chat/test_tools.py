"""Tools that are run here: what they declare, what they answer, and that no call raises."""

import datetime
import json
import zoneinfo

import pytest

from maxmoe import chat
from maxmoe.chat import tools
from maxmoe.chat.tools import Tool, Toolbox


def _result(box: Toolbox, name: str, arguments: str) -> str:
    call = {"id": "c_0", "type": "function", "function": {"name": name, "arguments": arguments}}
    (message,) = box.run([call])
    assert message.keys() == {"role", "tool_call_id", "content"}
    assert (message["role"], message["tool_call_id"]) == ("tool", "c_0")
    return message["content"]


@pytest.fixture
def box():
    return Toolbox.built_in(["calculator", "clock"])


def test_declarations_are_what_a_request_takes(box):
    declared = box.declarations()
    assert [tool["function"]["name"] for tool in declared] == ["calculator", "clock"]
    request = {"messages": [{"role": "user", "content": "q"}], "tools": declared}
    assert "calculator" in "".join(segment.text for segment in chat.render(request))


def test_results_come_in_the_order_of_their_calls(box):
    calls = [
        {"id": f"c_{i}", "type": "function", "function": {"name": "calculator", "arguments": json.dumps(arguments)}}
        for i, arguments in enumerate([{"expression": "6 * 7"}, {"expression": "1 / 0"}])
    ]
    assert box.run(calls) == [
        {"role": "tool", "tool_call_id": "c_0", "content": "42"},
        {"role": "tool", "tool_call_id": "c_1", "content": "error: division by zero"},
    ]


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("search", "{}", "error: no tool is named 'search'; there are calculator, clock"),
        ("calculator", "{", "error: the arguments are no JSON"),
        ("calculator", "[1]", "error: the arguments must be an object with expression"),
        ("calculator", "{}", "error: expression must be given"),
        (
            "calculator",
            '{"expression": "1", "digits": 2}',
            "error: calculator does not take digits; it takes expression",
        ),
        ("calculator", '{"expression": 1}', "error: expression must be of type string; got 1"),
        ("clock", '{"time_zone": "Mars/Base"}', "error: no time zone is named 'Mars/Base'"),
        ("clock", '{"time_zone": "../../etc/passwd"}', "error: no time zone is named"),
        ("clock", '{"time_zone": "Europe"}', "error: no time zone is named"),
        ("clock", '{"time_zone": ""}', "error: no time zone is named"),
    ],
)
def test_call_that_cannot_be_run_tells_the_model_why(box, name, arguments, says):
    assert _result(box, name, arguments).startswith(says)


def test_clock_tells_the_time_of_a_zone(box, monkeypatch):
    noon = datetime.datetime(2026, 12, 3, 12, 0, 5, tzinfo=datetime.UTC)
    monkeypatch.setattr(tools, "_now", noon.astimezone)
    assert _result(box, "clock", "{}") == "2026-12-03T12:00:05+00:00, Thursday, UTC"
    if not zoneinfo.available_timezones():
        pytest.skip("needs time zones: the system's or the package tzdata")
    zone = _result(box, "clock", '{"time_zone": "Asia/Tokyo"}')
    assert zone == "2026-12-03T21:00:05+09:00, Thursday, Asia/Tokyo"


def test_tools_of_other_kinds_have_their_arguments_checked():
    schema = {"properties": {"n": {"type": "number"}, "on": {"type": "boolean"}}}
    box = Toolbox([Tool(name="t", description="", parameters=schema, function=lambda **given: json.dumps(given))])
    assert _result(box, "t", '{"n": 1.5, "on": true}') == '{"n": 1.5, "on": true}'
    assert _result(box, "t", '{"n": "1"}') == "error: n must be of type number; got '1'"
    assert _result(box, "t", '{"n": true}') == "error: n must be of type number; got True"


def test_unknown_and_repeated_names_are_refused():
    with pytest.raises(ValueError, match="no tool is named 'search'; there are calculator, clock"):
        Toolbox.built_in(["clock", "search"])
    with pytest.raises(ValueError, match="each tool once"):
        Toolbox.built_in(["clock", "clock"])
