"""The chat page in a real browser, against a server that plays answers given in advance.

A screenshot of every kind of message goes to $MAXMOE_TEST_ARTEFACTS (default: .cache/test_artefacts).
"""

import json
import os
import struct
import zlib
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from selenium.webdriver.common.keys import Keys

from tests.server.page.browser import WAIT_S, needs_browser
from tests.server.page.stub_server import BREAK, STALL

ROOT = Path(__file__).resolve().parents[3]


def _history(messages: list[dict]) -> str:
    return json.dumps(messages, sort_keys=True)


_CALL = {"index": 0, "id": "calculator_0", "type": "function", "function": {"name": "calculator", "arguments": ""}}


def _arguments(piece: str) -> dict:
    return {"tool_calls": [{"index": 0, "function": {"arguments": piece}}]}


@needs_browser
def test_answer_appears_while_it_comes_and_thinking_is_folded(chat):
    chat.stub.will_say({"reasoning_content": "Let me "}, {"reasoning_content": "see."}, {"content": "Hello"}, STALL)
    chat.send("hi")
    chat.until(lambda: chat.text(".assistant .text") == "Hello")
    assert chat.text(".user .text") == "hi"
    assert chat.one(".assistant").get_attribute("aria-busy") == "true"
    thinking = chat.one(".assistant details")
    assert thinking.get_attribute("open") is None
    assert not chat.one(".thinking-text").is_displayed() and chat.text(".thinking-text") == "Let me see."
    assert "Thought for" in thinking.text
    chat.one(".assistant summary").click()
    assert chat.one(".thinking-text").is_displayed()


@needs_browser
def test_end_of_an_answer_shows_its_numbers(chat):
    chat.stub.will_say({"reasoning_content": "w"}, {"content": "Yes."})
    chat.send("q")
    chat.await_answer()
    assert "30 tokens" in chat.text(".assistant summary")
    facts = chat.text(".facts")
    assert facts.startswith("42 tokens · ") and "prompt 210 tokens, 128 cached" in facts and "tokens/s" in facts
    assert chat.one(".assistant").get_attribute("aria-busy") == "false"


@needs_browser
def test_request_carries_effort_system_prompt_and_model(chat):
    chat.set("system", "Answer in French.")
    assert chat.one('input[name="effort"]:checked').get_attribute("value") == "max"
    chat.one('input[value="low"] + span').click()
    chat.stub.will_say({"content": "Oui."})
    chat.send("q")
    chat.await_answer()
    (body,) = chat.stub.bodies
    assert body == {
        "model": "stub",
        "messages": [{"role": "system", "content": "Answer in French."}, {"role": "user", "content": "q"}],
        "reasoning_effort": "low",
        "stream": True,
        "stream_options": {"include_usage": True},
    }


@needs_browser
def test_history_goes_back_byte_for_byte(chat):
    reasoning, content = ' \n\t"why" <|close|>think\u2028 \U0001f680', "\n  a\r\n\n```py\n\tx  \n```\n **b** \\ \x1b é"
    pieces = [{"reasoning_content": char} for char in reasoning] + [{"content": char} for char in content]
    chat.stub.will_say(*pieces)
    chat.stub.will_say({"content": "two"})
    chat.send("one")
    chat.await_answer()
    chat.send("more")
    chat.await_answer(2)
    assert _history(chat.stub.bodies[1]["messages"]) == _history(
        [
            {"role": "user", "content": "one"},
            {"role": "assistant", "reasoning_content": reasoning, "content": content},
            {"role": "user", "content": "more"},
        ]
    )


@needs_browser
def test_answer_without_a_text_is_said_to_be_one_and_kept(chat):
    chat.stub.will_say({"reasoning_content": "hm"})
    chat.stub.will_say(finish="length")
    chat.stub.will_say({"content": "ok"})
    for number, text in enumerate(("one", "two", "three"), 1):
        chat.send(text)
        chat.await_answer(number)
    assert chat.text(".note") == "The model ended without an answer.|The model ended without an answer."
    _, second, third = [body["messages"] for body in chat.stub.bodies]
    assert second[1] == {"role": "assistant", "reasoning_content": "hm", "content": ""}
    assert third[3] == {"role": "assistant", "content": ""}


@needs_browser
def test_tool_call_is_shown_and_its_result_sent(chat):
    tools = [{"type": "function", "function": {"name": "calculator"}}]
    chat.set("tools", json.dumps(tools))
    pieces = ('{"expression": "', "6*", '7"}')
    chat.stub.will_say(
        {"reasoning_content": "r"}, {"tool_calls": [_CALL]}, *map(_arguments, pieces), finish="tool_calls"
    )
    chat.stub.will_say({"content": "It is 42."})
    chat.send("6*7?")
    chat.await_answer()
    assert chat.text(".call-name") == "calculator"
    assert chat.text(".call-arguments") == '{"expression": "6*7"}'
    assert not chat.one("#send").is_enabled()
    chat.one(".call textarea").send_keys("42")
    chat.one(".results button").click()
    chat.await_answer(2)
    assert "42" in chat.text(".call-result")
    first, second = chat.stub.bodies
    assert first["tools"] == second["tools"] == tools
    function = {"name": "calculator", "arguments": '{"expression": "6*7"}'}
    calls = [{"id": "calculator_0", "type": "function", "function": function}]
    assert second["messages"][1:] == [
        {"role": "assistant", "reasoning_content": "r", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "calculator_0", "content": "42"},
    ]


@needs_browser
def test_tools_that_are_no_json_are_not_sent(chat):
    chat.set("tools", '[{"type": ')
    chat.send("q")
    assert "not JSON" in chat.text("#tools-problem")
    assert chat.stub.bodies == [] and chat.one("#prompt").get_attribute("value") == "q"


@needs_browser
@pytest.mark.parametrize("by", ["button", "key"])
def test_stop_ends_the_request_and_keeps_what_came(chat, by):
    chat.stub.will_say(
        {"reasoning_content": "hm"}, {"content": "One, two"}, {"tool_calls": [_CALL]}, _arguments('{"a'), STALL
    )
    chat.stub.will_say({"content": "ok"})
    chat.send("count")
    chat.until(lambda: chat.text(".call-arguments") == '{"a')
    if by == "button":
        chat.one("#stop").click()
    else:
        chat.one("#prompt").send_keys(Keys.ESCAPE)
    chat.await_answer()
    assert chat.stub.client_left.wait(WAIT_S)
    assert "stopped" in chat.text(".facts") and "not kept" in chat.text(".note")
    assert not chat.one("#stop").is_displayed()
    chat.send("go on")
    chat.await_answer(2)
    assert chat.stub.bodies[1]["messages"][1] == {
        "role": "assistant",
        "reasoning_content": "hm",
        "content": "One, two",
    }


@needs_browser
def test_error_shows_the_words_of_the_server_and_can_be_tried_again(chat):
    chat.stub.will_refuse(400, "the prompt has 9,000 tokens, max_len is 8,192")
    chat.stub.will_say({"content": "half"}, {"error": {"message": "the device was lost"}})
    chat.stub.will_say({"content": "half"}, BREAK)
    chat.stub.will_say({"content": "whole"})
    chat.send("q")
    for text in ("the prompt has 9,000 tokens, max_len is 8,192", "the device was lost", "ended before the answer"):
        chat.until(lambda text=text: text in chat.text(".error span"))
        chat.one(".error button").click()
    chat.until(lambda: chat.text(".assistant .text") == "whole")
    assert chat.all(".error") == []
    assert [body["messages"] for body in chat.stub.bodies] == [[{"role": "user", "content": "q"}]] * 4


@needs_browser
def test_key_is_asked_for_and_kept_in_the_session_alone(chat):
    chat.stub.key = "secret"
    chat.driver.refresh()
    chat.until(lambda: "asks for an API key" in chat.text("#notice"))
    chat.one("#api-key").send_keys("secret", Keys.TAB)
    chat.until(lambda: chat.text("#model") == "stub" and chat.text("#notice") == "")
    chat.stub.will_say({"content": "in"})
    chat.send("q")
    chat.await_answer()
    assert chat.stub.keys[-1] == "Bearer secret"
    stored = chat.driver.execute_script("return [Object.values(sessionStorage), localStorage.length, document.cookie]")
    assert stored == [["secret"], 0, ""]
    chat.driver.execute_script("sessionStorage.clear()")


def _png(width: int, height: int) -> bytes:
    """A grey picture."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = (b"\0" + b"\x80" * width) * height
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)


@needs_browser
def test_images_are_for_models_that_see(chat, tmp_path):
    assert not chat.one("#attach").is_displayed()
    chat.stub.vision = True
    chat.driver.refresh()
    chat.until(lambda: chat.one("#attach").is_displayed())
    (tmp_path / "dot.svg").write_text("no image")
    chat.one("#files").send_keys(str(tmp_path / "dot.svg"))
    chat.until(lambda: "dot.svg is not an image" in chat.text("#notice"))
    (tmp_path / "dot.png").write_bytes(_png(3, 2))
    chat.one("#files").send_keys(str(tmp_path / "dot.png"))
    chat.until(lambda: len(chat.all("#images canvas")) == 1)
    chat.stub.will_say({"content": "a dot"})
    chat.send("what is it?")
    chat.await_answer()
    image, text = chat.stub.bodies[0]["messages"][0]["content"]
    assert text == {"type": "text", "text": "what is it?"}
    assert image["type"] == "image_url" and image["image_url"]["url"].startswith("data:image/png;base64,iVBORw0KGgo")
    assert len(chat.all(".user canvas")) == 1 and chat.all("#images canvas") == []


@needs_browser
def test_new_chat_forgets_the_conversation_and_ends_an_answer(chat):
    chat.stub.will_say({"content": "old"}, STALL)
    chat.send("old")
    chat.until(lambda: chat.text(".assistant .text") == "old")
    chat.one("#new-chat").click()
    assert chat.stub.client_left.wait(WAIT_S)
    chat.stub.will_say({"content": "new"})
    chat.send("new")
    chat.await_answer()
    assert chat.stub.bodies[1]["messages"] == [{"role": "user", "content": "new"}]


@needs_browser
def test_strip_shows_the_load_of_the_server(chat):
    chat.stub.metrics.engine_state(3, 1, 0.42, 1000, 640)
    for _ in range(40):
        chat.stub.metrics.token_time(0.02)
    chat.until(lambda: chat.text('[data-metric="running"]') == "3")
    strip = {place.get_attribute("data-metric"): place.text for place in chat.all("[data-metric]")}
    assert float(strip.pop("speed")) > 0
    assert strip == {"running": "3", "waiting": "1", "cache": "42 %", "hits": "64 %"}


@needs_browser
def test_no_request_leaves_the_server_and_a_picture_is_kept(chat):
    chat.stub.metrics.engine_state(2, 0, 0.31, 1000, 640)
    table = "Two ways, in `O(n)`:\n\n```python\ndef square(x: float) -> float:\n    return x * x\n```\n\n"
    call = {"index": 0, "id": "c_0", "type": "function", "function": {"name": "calculator", "arguments": ""}}
    thinking = "The user wants squares. " * 12
    chat.stub.will_say({"reasoning_content": thinking}, {"content": f"{table}**12² is 144**, if I remember well."})
    chat.stub.will_say(
        {"reasoning_content": "Check."},
        {"content": "Let me make sure."},
        {"tool_calls": [call]},
        _arguments('{"expression": "12 ** 2"}'),
        finish="tool_calls",
    )
    chat.stub.will_refuse(503, "the queue is full: 64 requests wait. Try again in a few seconds")
    chat.send("How do I square a number in Python?")
    chat.await_answer()
    chat.send("Are you sure about 12?")
    chat.await_answer(2)
    chat.one(".call textarea").send_keys("144")
    chat.one(".results button").click()
    chat.until(lambda: chat.all(".error"))
    chat.until(lambda: chat.text('[data-metric="running"]') == "2")
    folder = Path(os.environ.get("MAXMOE_TEST_ARTEFACTS", ROOT / ".cache/test_artefacts"))
    folder.mkdir(parents=True, exist_ok=True)
    for scheme, width in (("light", 1100), ("dark", 420)):
        feature = {"name": "prefers-color-scheme", "value": scheme}
        chat.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
        size = {"width": width, "height": 1250, "deviceScaleFactor": 1, "mobile": False}
        chat.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        assert chat.driver.execute_script("return document.documentElement.scrollWidth <= innerWidth"), "scrolls aside"
        chat.driver.save_screenshot(str(folder / f"page_{scheme}.png"))
    chat.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    messages = [json.loads(entry["message"])["message"] for entry in chat.driver.get_log("performance")]
    sent = [m["params"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    urls = [one["request"]["url"] for one in sent if one["documentURL"].startswith(chat.stub.url)]
    assert len(urls) > 10
    assert {urlsplit(url).netloc for url in urls} == {urlsplit(chat.stub.url).netloc}
