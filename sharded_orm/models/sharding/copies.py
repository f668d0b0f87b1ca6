"""Recognizes global models whose rows are copied to every shard.

Statements on a shard can join these rows.
"""

from __future__ import annotations

from typing import Any


def has_copies(model: Any) -> bool:
    """Return whether each shard of each group has a table with copies of all rows of ``model``.

    If so, a statement on a shard can join the rows or read them in a subquery. An app that
    maintains such copies sets ``_has_copies_on_shards`` on the class of the model.
    """
    return getattr(model, "_has_copies_on_shards", False) is True
