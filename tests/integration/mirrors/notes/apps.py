from __future__ import annotations

from django.apps import AppConfig


class NotesConfig(AppConfig):
    name = "tests.integration.mirrors.notes"
    label = "notes"
