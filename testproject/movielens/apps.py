"""Films, and what people think of them."""

from __future__ import annotations

from django.apps import AppConfig


class MovielensConfig(AppConfig):
    name = "testproject.movielens"
    verbose_name = "MovieLens"
