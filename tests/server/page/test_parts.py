"""What holds the chat page together: its policy, text that stays text, and the parts that read a stream."""

from selenium.webdriver.common.keys import Keys

from tests.server.page.browser import needs_browser


@needs_browser
def test_markup_in_a_text_is_text(chat):
    evil = "<script>window.wasRun = 1</script><img src=x onerror='window.wasRun = 1'>"
    function = {"name": evil, "arguments": evil}
    call = {"tool_calls": [{"index": 0, "id": "c_0", "type": "function", "function": function}]}
    chat.stub.will_say({"reasoning_content": evil}, {"content": f"{evil}\n```html\n{evil}\n```\n"}, call)
    chat.send(evil)
    chat.await_answer()
    assert chat.text(".assistant .line").startswith(evil) and chat.text(".code pre") == f"{evil}\n"
    assert chat.text(".user .text") == chat.text(".thinking-text") == chat.text(".call-name") == evil
    assert chat.all("#log script, #log img") == []
    assert chat.driver.execute_script("return window.wasRun") is None


@needs_browser
def test_policy_of_the_browser_refuses_markup_and_other_servers(chat):
    refused = "try { document.body.innerHTML = '<b>x</b>'; return 'made'; } catch (error) { return error.name; }"
    assert chat.run(refused) == "TypeError"
    sent_elsewhere = """
      const refused = new Promise((resolve) => addEventListener("securitypolicyviolation", resolve, { once: true }));
      const name = await fetch("http://localhost:9/").catch((error) => error.name);
      return [name, (await refused).effectiveDirective];
    """
    assert chat.run(sent_elsewhere) == ["TypeError", "connect-src"]
    chat.driver.get_log("browser")  # it has complained, as it should


@needs_browser
def test_page_works_by_keyboard_and_says_what_its_parts_are(chat):
    assert chat.driver.switch_to.active_element.get_attribute("id") == "prompt"
    chat.one("#prompt").send_keys("a", Keys.SHIFT, Keys.ENTER, Keys.NULL, "b")
    assert chat.one("#prompt").get_attribute("value") == "a\nb" and chat.stub.bodies == []
    unnamed = """
      return [...document.querySelectorAll("button, input:not([hidden]), select, textarea")].filter(
        (e) => !e.ariaLabel && !e.labels?.length && !e.textContent.trim()).map((e) => e.outerHTML);
    """
    assert chat.driver.execute_script(unnamed) == []


@needs_browser
def test_events_are_read_wherever_the_chunks_end(chat):
    raw = (
        'data: {"a": "é\U0001f680"}\n\n: comment\n\ndata:one\r\ndata: two\r\n\r\ndata: [DONE]\n\ndata: cut off'.encode()
    )
    script = """
      const { events } = await $("sse.js");
      const [bytes, size] = [new Uint8Array(args[0]), args[1]];
      const body = new ReadableStream({ start(controller) {
        for (let at = 0; at < bytes.length; at += size) controller.enqueue(bytes.slice(at, at + size));
        controller.close();
      } });
      const found = [];
      for await (const data of events(body)) found.push(data);
      return found;
    """
    for size in (1, 2, 3, 7, len(raw)):
        assert chat.run(script, list(raw), size) == ['{"a": "é\U0001f680"}', "one\ntwo", "[DONE]"], size


@needs_browser
def test_markdown_is_the_same_however_its_text_comes(chat):
    text = "# Title\nSome `code` and **bold**, 2 ** 3\n\n```py\ndef f():\n    return '``'\n```\n"
    text += "after\n~~~\n```\n~~~\n``` not"
    script = """
      const { Markdown } = await $("markdown.js");
      const place = document.createElement("div");
      const shown = new Markdown(place);
      for (let at = 0; at < args[0].length; at += args[1]) shown.append(args[0].slice(at, at + args[1]));
      return [...place.children].map((e) => e.querySelector("pre") ? ["code", e.querySelector("code").textContent]
        : [e.className, e.textContent, [...e.children].map((c) => c.tagName + ":" + c.textContent)]);
    """
    expected = [
        ["line heading h1", "Title", []],
        ["line", "Some code and bold, 2 ** 3", ["CODE:code", "STRONG:bold"]],
        ["line", "", []],
        ["code", "def f():\n    return '``'\n"],
        ["line", "after", []],
        ["code", "```\n"],
        ["line", "``` not", []],
    ]
    for size in (1, 2, 5, len(text)):
        assert chat.run(script, text, size) == expected, size
