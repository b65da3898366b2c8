"""The files of the chat page: under which addresses and with which headers they are served."""

import http.client
import re
from urllib.parse import urlsplit

import pytest

from maxmoe.server import page
from tests.server.page import stub_server


@pytest.fixture(scope="module")
def get():
    """Asks a server: the status, the headers and the body."""
    with stub_server.running() as stub:

        def ask(path, headers=None, method="GET"):
            connection = http.client.HTTPConnection(urlsplit(stub.url).netloc, timeout=20)
            connection.request(method, path, headers=headers or {})
            response = connection.getresponse()
            body = response.read()
            connection.close()
            return response.status, response.headers, body

        yield ask


def test_page_allows_its_own_origin_alone(get):
    status, headers, body = get("/")
    assert status == 200 and headers["Content-Type"] == "text/html; charset=utf-8"
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'self';") and "unsafe" not in policy and "http" not in policy
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert not re.search(rb"<script(?![^>]*\bsrc=)|\bon\w+=|\bstyle=|<style", body), (
        "inline scripts and styles are refused"
    )


def test_what_the_page_names_is_there(get):
    _, _, body = get("/")
    names = set(re.findall(rb'(?:src|href)="([^"]+)"', body))
    assert {b"page/page.js", b"page/page.css", b"page/icon.svg"} <= names
    types = {"js": "text/javascript; charset=utf-8", "css": "text/css; charset=utf-8", "svg": "image/svg+xml"}
    for route in page.routes():
        if route.path != "/":
            status, headers, text = get(route.path)
            assert status == 200 and headers["Content-Type"] == types[route.path.rsplit(".")[-1]]
            for imported in re.findall(rb'from "\./([^"]+)"', text):
                assert get(f"/page/{imported.decode()}")[0] == 200, imported


@pytest.mark.parametrize("path", ["/page/__init__.py", "/page/index.html", "/page/", "/page/..%2f__init__.py"])
def test_nothing_else_is_served(get, path):
    assert get(path)[0] == 404


def test_browser_that_has_a_file_is_not_sent_it_again(get):
    _, headers, body = get("/page/page.js")
    assert body and headers["Cache-Control"] == "no-cache"
    status, again, body = get("/page/page.js", {"If-None-Match": headers["ETag"]})
    assert (status, body, again["ETag"]) == (304, b"", headers["ETag"])
    assert get("/page/page.js", {"If-None-Match": '"another"'})[0] == 200


def test_head_sends_headers_alone(get):
    status, headers, body = get("/", method="HEAD")
    assert status == 200 and int(headers["Content-Length"]) > 1000 and body == b""
