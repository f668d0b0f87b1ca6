from __future__ import annotations

from django.apps import AppConfig


class EntriesConfig(AppConfig):
    name = "tests.integration.promotion.entries"
    label = "entries"
