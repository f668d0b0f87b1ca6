"""Error pages for visitors; the same with ``DEBUG``, which only turns on the panel."""

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
        # The page shows who is logged in.
        return not_now(request, exc)


def not_now(request: HttpRequest, exception: Exception) -> HttpResponse:
    """Return a 503 that asks the visitor to come again."""
    logger.error("%s %s", request.method, request.path, exc_info=exception)
    # Without the request, as its user may be in the unreachable database.
    page = render_to_string("503.html")
    return HttpResponse(page, status=503, headers={"Retry-After": "30"})


class ErrorPages:
    """Answers with 503 if a database cannot be reached: while a node is down, on the pages of its
    users.

    A missing object has the site's own page with ``DEBUG`` as well.
    """

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase]) -> None:
        self._get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        response = self._get_response(request)
        if settings.DEBUG and response.status_code == 404 and request.resolver_match is None:
            # No view matched, so Django has answered without the handler.
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

    Django hides only those in its settings. But ``SHARDED_ORM_DEMO_MYSQL`` and the like are in the
    environment, which Django's server puts into each request, and drivers have passwords in variables.
    """

    hidden_settings = re.compile(
        f"{SafeExceptionReporterFilter.hidden_settings.pattern}|SHARDED_ORM_DEMO_(?:MYSQL|POSTGRESQL)",
        re.IGNORECASE,
    )

    def get_traceback_frame_variables(
        self, request: HttpRequest, tb_frame: FrameType
    ) -> list[tuple[str, Any]]:
        variables = super().get_traceback_frame_variables(request, tb_frame)
        return [(name, self.cleanse_setting(name, value)) for name, value in variables]
