"""Puts the debug panel at the end of each page."""

from __future__ import annotations

from collections.abc import Callable

from django.conf import settings
from django.core.exceptions import MiddlewareNotUsed
from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.template.loader import render_to_string

from sharded_orm.signals import scattered
from testproject.panel.recording import note_scatter, recording


class PanelMiddleware:
    """Shows which shards and nodes served a page, with numbers of statements and cache hits.

    Does nothing without ``DEBUG``: the panel is not for visitors.
    """

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase]) -> None:
        if not settings.DEBUG:
            raise MiddlewareNotUsed
        self._get_response = get_response
        scattered.connect(note_scatter)

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        with recording() as recorded:
            response = self._get_response(request)
        if isinstance(response, HttpResponse) and _is_page(response):
            panel = render_to_string("panel/panel.html", {"recorded": recorded})
            before, body, after = response.content.rpartition(b"</body>")
            response.content = before + panel.encode(response.charset) + body + after
            if response.has_header("Content-Length"):
                response.headers["Content-Length"] = str(len(response.content))
        return response


def _is_page(response: HttpResponse) -> bool:
    return (
        response.headers.get("Content-Type", "").startswith("text/html")
        and not response.has_header("Content-Encoding")
        and b"</body>" in response.content
    )
