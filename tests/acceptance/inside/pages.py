"""Helpers for the tests of several pages."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from django.db import connections
from django.test import Client, TestCase

from testproject.databases import SHARDS

NODES = 2


def committed() -> AbstractContextManager[Any]:
    """A block after which mirrors are written, as after a commit. A test itself commits nothing."""
    return TestCase.captureOnCommitCallbacks(using="photos", execute=True)


def token(client: Client, path: str) -> str:
    """The CSRF token of the form on the page ``path``."""
    return str(client.get(path).context["csrf_token"])


def titles(page: Any) -> list[str]:
    """The titles of the photos on a page that reads from all shards."""
    return [photo.title for photo in page.context["page"].photos]


def most_statements(used: int) -> int:
    """The largest number of statements that a query of all shards may need.

    A SQLite shard is queried by itself; a node is queried for keys first and then for rows.

    :param used: number of shards with an open transaction, which are queried in that transaction.
    """
    return SHARDS if connections["default"].vendor == "sqlite" else 2 * (NODES + used)
