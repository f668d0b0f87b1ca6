"""What visitors get instead of a page; the same with ``DEBUG``, which is for the panel."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from types import FrameType
from typing import Any

from django.conf import settings
from django.db import OperationalError
from django.http import Http404, HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.template.loader import render_to_string
from django.views.debug import SafeExceptionReporterFilter
from django.views.defaults import page_not_found

from testproject.photos.pictures import TooBusy

logger = logging.getLogger(__name__)


def not_found(request: HttpRequest, exception: Exception) -> HttpResponse:
    """The ``handler404`` of the site."""
    try:
        return page_not_found(request, exception)
    except OperationalError as exc:
        # The page asks who is logged in.
        return not_now(request, exc)


def not_now(request: HttpRequest, exception: Exception) -> HttpResponse:
    """A 503 that asks to come again."""
    logger.error("%s %s", request.method, request.path, exc_info=exception)
    # Without the request: its user may be what cannot be reached.
    page = render_to_string("503.html")
    return HttpResponse(page, status=503, headers={"Retry-After": "30"})


class ErrorPages:
    """What cannot be reached is a 503: while a node is down, the pages of its users.

    What is not there has the page of the site with ``DEBUG`` as well.
    """

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase]) -> None:
        self._get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        response = self._get_response(request)
        if settings.DEBUG and response.status_code == 404 and request.resolver_match is None:
            # No view was found that could fail, so Django has answered, without the handler.
            return not_found(request, Http404())
        return response

    def process_exception(self, request: HttpRequest, exception: Exception) -> HttpResponse | None:
        if isinstance(exception, Http404):
            return not_found(request, exception)
        if isinstance(exception, (OperationalError, TooBusy)):
            return not_now(request, exception)
        return None


class CredentialsHidden(SafeExceptionReporterFilter):
    """Django's error page for developers, without passwords.

    Django hides those of its settings only, but ``SHARDED_ORM_DEMO_MYSQL`` is in the environment,
    which its server passes on with each request, and drivers have them in variables.
    """

    hidden_settings = re.compile(
        f"{SafeExceptionReporterFilter.hidden_settings.pattern}|SHARDED_ORM_DEMO_MYSQL",
        re.IGNORECASE,
    )

    def get_traceback_frame_variables(
        self, request: HttpRequest, tb_frame: FrameType
    ) -> list[tuple[str, Any]]:
        variables = super().get_traceback_frame_variables(request, tb_frame)
        return [(name, self.cleanse_setting(name, value)) for name, value in variables]
