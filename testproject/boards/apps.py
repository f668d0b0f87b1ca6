"""Boards, on which users pin photos: objects and mappings instead of tables with columns."""

from __future__ import annotations

from django.apps import AppConfig


class BoardsConfig(AppConfig):
    name = "testproject.boards"
