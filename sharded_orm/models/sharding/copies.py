"""Recognises global models whose rows are copied to every shard, so that statements can join them."""

from __future__ import annotations

from typing import Any


def has_copies(model: Any) -> bool:
    """Whether each shard of each group has a table of ``model`` with copies of its global rows.

    An app that maintains such copies sets ``_has_copies_on_shards`` on the class. Each shard has
    all rows of the model, so a statement may join them or read them in a subquery.
    """
    return getattr(model, "_has_copies_on_shards", False) is True
