"""A chat page for the server's own endpoints: plain HTML, CSS and ES modules, no build step, nothing from elsewhere.

The browser enforces what the page promises: the policy below lets it load from and talk to this server alone, runs no
script but its files, and refuses text as markup.
"""

import hashlib
from importlib import resources
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_INDEX = "index.html"
_MEDIA_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'; "
        "require-trusted-types-for 'script'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    # Kept, and asked about each time: a server that was updated is never seen through files of the one before it.
    "Cache-Control": "no-cache",
}


class _File(NamedTuple):
    body: bytes
    media_type: str
    etag: str

    async def respond(self, request: Request) -> Response:
        """The file, or 304 where the browser has it."""
        headers = _HEADERS | {"ETag": self.etag}
        if self.etag in request.headers.get("If-None-Match", ""):
            return Response(status_code=304, headers=headers)
        return Response(self.body, media_type=self.media_type, headers=headers)


def routes() -> list[Route]:
    """The page at `/`, and its files under `/page/`, read once. All its links are relative, so a prefix may precede."""
    found = []
    for entry in resources.files(__name__).iterdir():
        media_type = _MEDIA_TYPES.get("." + entry.name.rpartition(".")[2])
        if media_type is not None:
            body = entry.read_bytes()
            file = _File(body, media_type, f'"{hashlib.sha256(body).hexdigest()[:32]}"')
            path = "/" if entry.name == _INDEX else f"/page/{entry.name}"
            found.append(Route(path, file.respond, name=f"page:{entry.name}"))
    return found
