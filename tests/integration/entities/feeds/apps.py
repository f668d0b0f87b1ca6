from __future__ import annotations

from django.apps import AppConfig


class FeedsConfig(AppConfig):
    name = "tests.integration.entities.feeds"
    label = "feeds"
