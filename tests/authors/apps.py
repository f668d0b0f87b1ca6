from __future__ import annotations

from django.apps import AppConfig


class AuthorsConfig(AppConfig):
    name = "tests.authors"
