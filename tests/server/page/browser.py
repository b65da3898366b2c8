"""A headless browser that shows the chat page of a stub server."""

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

from tests.server.page import stub_server

WAIT_S = 20  # for a browser on a busy machine; what is waited for takes milliseconds
_FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --window-size=1100,900"
)
_BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_DRIVER = shutil.which("chromedriver")

needs_browser = pytest.mark.skipif(
    not (_BROWSER and _DRIVER), reason="needs chromium and chromedriver on PATH: Debian's chromium and chromium-driver"
)


class Page:
    """The page as its user sees it.

    Attributes:
      stub: The server that it speaks to.
    """

    def __init__(self, driver: webdriver.Chrome, stub: stub_server.StubServer):
        self.driver, self.stub = driver, stub

    @contextlib.contextmanager
    def opened_anew(self) -> Iterator[None]:
        """Opens the page; at the end, the browser must have nothing to complain about but errors of the server."""
        self.stub.reset()
        self.driver.get_log("browser")
        self.driver.get(self.stub.url)
        self.until(lambda: self.text("#model"))
        yield
        severe = [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]
        assert [text for text in severe if "status of 4" not in text and "status of 5" not in text] == []

    def until(self, holds: Callable[[], Any]) -> Any:
        return WebDriverWait(self.driver, WAIT_S, 0.02).until(lambda _: holds())

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def one(self, selector: str) -> WebElement:
        (found,) = self.all(selector)
        return found

    def text(self, selector: str) -> str:
        """The text of all elements that match, also where they are folded."""
        script = "return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent).join('|')"
        return self.driver.execute_script(script, selector)

    def send(self, text: str) -> None:
        """Writes a message and sends it by keyboard."""
        self.one("#prompt").send_keys(text, Keys.ENTER)

    def await_answer(self, number: int = 1) -> None:
        """Until the given number of answers have ended."""
        self.until(lambda: len(self.all(".assistant .facts")) == number)

    def set(self, field: str, value: str) -> None:
        """Fills a field of the settings, as by pasting."""
        script = "const f = document.getElementById(arguments[0]); f.value = arguments[1]; "
        self.driver.execute_script(script + "f.dispatchEvent(new Event('change'))", field, value)

    def run(self, script: str, *arguments: Any) -> Any:
        """The result of an async function of JavaScript; $ imports a file of the page."""
        whole = (
            "const [done, ...args] = [arguments[arguments.length - 1], ...arguments];"
            "const $ = (file) => import(`/page/${file}`);"
            f"(async () => {{ {script} }})().then((value) => done([value]), (error) => done(String(error)))"
        )
        (value,) = self.driver.execute_async_script(whole, *arguments)
        return value


@contextlib.contextmanager
def page(profile: Path) -> Iterator[Page]:
    """A browser with an empty profile, and a server for it."""
    options = webdriver.ChromeOptions()
    options.binary_location = _BROWSER
    for flag in (*_FLAGS.split(), f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    with stub_server.running() as stub, webdriver.Chrome(options, webdriver.ChromeService(_DRIVER)) as driver:
        yield Page(driver, stub)
