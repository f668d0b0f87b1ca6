"""Visits the site over HTTP as a browser would, for ``manage.py demo --check``."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from email.message import Message
from http.cookiejar import CookieJar
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote, urlencode
from urllib.request import HTTPCookieProcessor, HTTPRedirectHandler, Request, build_opener

from django.conf import settings
from django.contrib.staticfiles.handlers import StaticFilesHandler
from django.core.servers.basehttp import (
    ThreadedWSGIServer,
    WSGIRequestHandler,
    get_internal_wsgi_application,
)
from django.urls import reverse
from django.utils.html import escape

from testproject.boards.models import Board
from testproject.photos.installation import ADMIN
from testproject.photos.models import Photo, WrittenComment
from testproject.photos.pictures import WIDTHS

TIMEOUT = 30  # seconds


class CheckFailed(Exception):
    """A page is not as expected."""


@contextmanager
def serving(host: str, port: int) -> Iterator[str]:
    """Run Django's own server in a thread and yield its address. Port 0 picks a free port."""

    class Handler(WSGIRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass  # the check prints the requests itself

    server = ThreadedWSGIServer((host, port), Handler, ipv6=":" in host)
    server.set_app(StaticFilesHandler(get_internal_wsgi_application()))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        shown = f"[{host}]" if ":" in host else host
        yield f"http://{shown}:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Browser:
    """Keeps cookies and does not follow redirects."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.cookies = CookieJar()
        self._opener = build_opener(HTTPCookieProcessor(self.cookies), _StayHere())

    def open(self, path: str, form: dict[str, str] | None = None) -> tuple[int, str, Message]:
        """Return status, text and headers; ``\ufffd`` replaces bytes that are no text."""
        request = Request(self.address + path)
        if form is not None:
            token = next((c.value for c in self.cookies if c.name == "csrftoken"), None)
            request.data = urlencode({**form, "csrfmiddlewaretoken": token or ""}).encode()
        try:
            with self._opener.open(request, timeout=TIMEOUT) as answer:
                return answer.status, answer.read().decode(errors="replace"), answer.headers
        except HTTPError as answer:
            with answer:
                return answer.code, answer.read().decode(errors="replace"), answer.headers


class _StayHere(HTTPRedirectHandler):
    def redirect_request(self, *args: Any) -> None:
        return None


def browse(address: str, password: str) -> Iterator[str]:
    """Fetch every kind of page and log in; yield a line for each page.

    :raises CheckFailed: an answer is not the expected one.
    """
    photos = Photo.objects.scatter().select_related("album").order_by("photo_id")
    photo = photos.first()
    stranger = photos.exclude(owner=photo.owner).first() if photo else None
    if photo is None or stranger is None:
        raise CheckFailed("there is no sample content to look at")
    tag = photo.tags.filter(owner=photo.owner).first()
    written = WrittenComment.objects.scatter().order_by("comment_id").first()
    board = Board.objects.scatter().order_by("id").first()
    if tag is None or written is None or board is None:
        raise CheckFailed("the sample content has no tags, no comments or no boards")
    user_page = reverse("photos:user", args=[photo.owner.username])
    photo_page = f"{user_page}{photo.photo_id}/"
    pages: list[tuple[str, int, str]] = [
        ("/", 200, "Newest photos"),
        ("/tags/", 200, f"/tags/{quote(tag.text)}/"),
        (f"/tags/{quote(tag.text)}/", 200, "The newest photos with this tag"),
        (user_page, 200, escape(photo.title)),
        (f"{user_page}albums/{photo.album_id}/", 200, escape(photo.album.title)),
        (f"{user_page}tags/{quote(tag.text)}/", 200, escape(photo.title)),
        (
            reverse("photos:user_comments", args=[written.author.username]),
            200,
            f"Comments by {written.author}",
        ),
        (f"{user_page}activity/", 200, f"Activity of {photo.owner}"),
        (f"{user_page}activity/around/", 200, f"On photos of {photo.owner}"),
        (photo_page, 200, escape(photo.title)),
        *((f"/pictures/{photo.photo_id}/{width}.webp", 200, "WEBP") for width in WIDTHS),
        ("/static/photos/site.css", 200, "--accent"),
        (f"/photo/{photo.photo_id}/", 301, photo_page),
        ("/boards/", 200, escape(board.title)),
        (reverse("boards:of_user", args=[board.member.username]), 200, escape(board.title)),
        (board.get_absolute_url(), 200, escape(board.title)),
        (f"/boards/{board.member_id}/", 404, "Not found"),
        (f"/boards/pin/{photo.photo_id}/", 302, "/login/?next=/boards/pin/"),
        ("/photos/nobody-of-that-name/", 404, "Not found"),
        (f"{user_page}{stranger.photo_id}/", 404, "Not found"),
        (f"/photo/{2**63}/", 404, "Not found"),
        ("/upload/", 302, "/login/?next=/upload/"),
        ("/admin/login/", 200, "Log in"),
        ("/login/", 200, "Log in"),
    ]
    if settings.DEBUG:
        pages.append(("/", 200, "Debug panel"))
    browser = Browser(address)
    for path, status, text in pages:
        yield _expect(browser, path, status, text)
    form = {"username": ADMIN, "password": password, "next": "/admin/"}
    yield _expect(browser, "/login/", 302, "/admin/", form)
    yield _expect(browser, "/admin/", 200, "Site administration")
    yield _expect(browser, "/upload/", 200, "Upload a photo")
    yield _expect(browser, f"/boards/pin/{photo.photo_id}/", 200, "A new board")


def _expect(
    browser: Browser, path: str, status: int, text: str, form: dict[str, str] | None = None
) -> str:
    actual_status, body, headers = browser.open(path, form)
    where = headers.get("Location", "")
    method = "GET" if form is None else "POST"
    if actual_status != status or text not in (where if 300 <= status < 400 else body):
        raise CheckFailed(
            f"{method} {path}: expected {status} with {text!r}, got {actual_status}"
            f"{f' to {where}' if where else ''}:\n{body[:500]}"
        )
    return f"{method} {path}: {actual_status}{f' to {where}' if where else ''}"
