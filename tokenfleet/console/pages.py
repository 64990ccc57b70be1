"""The console's routes: its pages and files, each with headers that forbid everything from other origins.

Pages hold no data: they ask the API as any client does, with the key that a person types into them. So they
may be open to every caller, and a key never stands in an address.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from fastapi import APIRouter, Request, Response
from starlette.exceptions import HTTPException

from dataplane.http.server import Extension

STATIC = Path(__file__).with_name("static")
FOLDER = "/console/"
PAGES = {"/plan": "plan.html", "/portfolio": "portfolio.html", "/live": "live.html"}
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS = {
    # Only our own files, nothing inline: text that gets into a page stays text.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self';"
        " form-action 'none'; base-uri 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "cache-control": "no-cache",  # asked for again each time, answered 304 while it is the same
}


class StaticFile(NamedTuple):
    """A file, ready to be sent. `tag` changes with its content."""

    body: bytes
    media_type: str
    tag: str


def static_files(home: str, pages: Mapping[str, str] = PAGES) -> dict[str, StaticFile]:
    """Every file that may be asked for, by its path; nothing else can be. `home` is the page at `/`."""
    by_name = {path.name: _read(path) for path in sorted(STATIC.iterdir()) if path.suffix in TYPES}
    files = {FOLDER + name: file for name, file in by_name.items() if not name.endswith(".html")}
    return files | {path: by_name[name] for path, name in {"/": home, **pages}.items()}


def console_router(files: Mapping[str, StaticFile]) -> APIRouter:
    """GET routes of the pages and their files; they are for people, so OpenAPI leaves them out."""
    router = APIRouter(include_in_schema=False)

    async def page(request: Request) -> Response:
        file = files.get(request.url.path)
        if file is None:
            raise HTTPException(404)
        headers = HEADERS | {"etag": file.tag}
        if request.headers.get("if-none-match") == file.tag:
            return Response(status_code=304, headers=headers)
        return Response(file.body, media_type=file.media_type, headers=headers)

    for path in (*(one for one in files if not one.startswith(FOLDER)), FOLDER + "{name}"):
        router.add_api_route(path, page, methods=["GET", "HEAD"])
    return router


def console_extension(home: str = "plan.html", pages: Mapping[str, str] = PAGES) -> Extension:
    """The console as an API takes it in: the plan page at `/`, for a fleet the live one, or one alone."""
    files = static_files(home, pages)
    return Extension(routers=(console_router(files),), open_paths=frozenset(files))


def _read(path: Path) -> StaticFile:
    body = path.read_bytes()
    return StaticFile(body, TYPES[path.suffix], f'"{hashlib.sha256(body).hexdigest()[:16]}"')
