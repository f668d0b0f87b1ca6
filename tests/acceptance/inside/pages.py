"""What tests of several pages use."""

from __future__ import annotations

from typing import Any

from django.db import connections
from django.test import Client

from testproject.databases import SHARDS

NODES = 2


def token(client: Client, path: str) -> str:
    """What a form of the page ``path`` has for the view that takes it."""
    return str(client.get(path).context["csrf_token"])


def titles(page: Any) -> list[str]:
    """Of the photos on a page that scatters."""
    return [photo.title for photo in page.context["page"].photos]


def most_statements(used: int) -> int:
    """For a scattered query: a file is asked by itself, a node for keys and then for rows.

    :param used: shards that have an open transaction, which are asked in it.
    """
    return {"sqlite": SHARDS, "mysql": 2 * (NODES + used)}[connections["default"].vendor]
