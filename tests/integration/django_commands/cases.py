"""A test of a project, run by ``manage.py test``."""

# It runs under unittest.
# ruff: noqa: PT009

from __future__ import annotations

from django.test import TestCase

from tests.photos.models import Event


class EventTests(TestCase):
    databases = {"default", "events"}

    def test_shards_are_those_of_the_test(self) -> None:
        self.assertEqual(Event.objects.scatter().count(), 0)
        Event.objects.create(account="ada")
        self.assertEqual(Event.objects.filter(account="ada").count(), 1)
