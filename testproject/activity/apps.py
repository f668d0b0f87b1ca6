"""The activity of users."""

from __future__ import annotations

from django.apps import AppConfig


class ActivityConfig(AppConfig):
    name = "testproject.activity"
