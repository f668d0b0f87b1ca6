from __future__ import annotations

from django.apps import AppConfig


class GeoConfig(AppConfig):
    name = "tests.integration.references.geo"
    label = "geo"
