"""The photo site."""

from __future__ import annotations

from django.apps import AppConfig


class PhotosConfig(AppConfig):
    name = "testproject.photos"
