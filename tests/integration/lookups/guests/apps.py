from __future__ import annotations

from django.apps import AppConfig


class GuestsConfig(AppConfig):
    name = "tests.integration.lookups.guests"
    label = "guests"
