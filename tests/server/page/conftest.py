"""A browser for the tests of this folder, and the page in it."""

import pytest

from tests.server.page import browser


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    with browser.page(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture
def chat(page):
    with page.opened_anew():
        yield page
