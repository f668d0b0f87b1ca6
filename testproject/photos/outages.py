"""What visitors see while a node is down: the pages of its users say so, the others work."""

from __future__ import annotations

import logging
from collections.abc import Callable

from django.conf import settings
from django.db import OperationalError
from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.shortcuts import render

logger = logging.getLogger(__name__)


class OutageMiddleware:
    """A page of the site that cannot reach its databases is a 503 that asks to come again.

    With ``DEBUG`` it is Django's page for developers.
    """

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase]) -> None:
        self._get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        return self._get_response(request)

    def process_exception(self, request: HttpRequest, exception: Exception) -> HttpResponse | None:
        match = request.resolver_match
        if settings.DEBUG or match is None or match.app_name != "photos":
            return None
        if not isinstance(exception, OperationalError):
            return None
        logger.error("%s %s", request.method, request.path, exc_info=exception)
        answer = render(request, "503.html", status=503)
        answer.headers["Retry-After"] = "30"
        return answer
