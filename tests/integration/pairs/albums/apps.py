from __future__ import annotations

from django.apps import AppConfig


class AlbumsConfig(AppConfig):
    name = "tests.integration.pairs.albums"
    label = "albums"
