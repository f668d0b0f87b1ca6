"""Films, and their ratings and tags."""

from __future__ import annotations

from django.apps import AppConfig


class MovielensConfig(AppConfig):
    name = "testproject.movielens"
    verbose_name = "MovieLens"
