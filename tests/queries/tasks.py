"""A task of ``django.tasks``, which Django 6.0 and later have."""

from __future__ import annotations

from django.tasks import task  # type: ignore[import-not-found,unused-ignore]

from tests.photos.models import Photo


@task
def star(user_id: int, pk: int) -> int:
    return Photo.objects.filter(user_id=user_id, pk=pk).update(stars=5)
