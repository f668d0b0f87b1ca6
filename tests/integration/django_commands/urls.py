from __future__ import annotations

from django.http import HttpRequest, HttpResponse
from django.urls import path

from tests.photos.models import Photo


def titles(request: HttpRequest) -> HttpResponse:
    return HttpResponse(",".join(Photo.objects.scatter().values_list("title", flat=True)))


urlpatterns = [path("", titles)]
