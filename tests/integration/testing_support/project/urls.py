"""Views that write, for the tests of ATOMIC_REQUESTS and of the live server."""

from __future__ import annotations

from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.urls import path

from tests.integration.testing_support.project.notes.models import Note


def write(request: HttpRequest) -> HttpResponse:
    for owner in request.GET.getlist("owner"):
        Note.objects.create(owner=int(owner), text="view")
    if "fail" in request.GET:
        raise ValueError("the view fails")
    return HttpResponse(", ".join(sorted(_open())))


def _open() -> frozenset[str]:
    group = transaction.get_connection("notes")
    aliases: frozenset[str] = group.open_transactions()
    return aliases


@transaction.non_atomic_requests(using="notes")
def write_at_once(request: HttpRequest) -> HttpResponse:
    return write(request)


async def write_async(request: HttpRequest) -> HttpResponse:
    return HttpResponse()


def count(request: HttpRequest) -> HttpResponse:
    return HttpResponse(str(Note.objects.filter(owner=int(request.GET["owner"])).count()))


urlpatterns = [
    path("write/", write),
    path("write_at_once/", write_at_once),
    path("write_async/", write_async),
    path("count/", count),
]
