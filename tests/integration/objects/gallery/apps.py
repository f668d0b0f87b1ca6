from __future__ import annotations

from django.apps import AppConfig


class GalleryConfig(AppConfig):
    name = "tests.integration.objects.gallery"
    label = "gallery"
