"""Tells whether a site, and each of its shard groups, can commit transactions in two phases."""

from __future__ import annotations

from typing import Any, Final

from django.apps import apps
from django.db import connections

#: The app with the table of decisions. When a shard decides that a transaction in two phases is
#: committed, it stores a row in this table.
APP: Final = "sharded_orm.contrib.two_phase"


def is_enabled() -> bool:
    """Whether the app with the table of decisions is installed. Two-phase commits need this table."""
    return apps.is_installed(APP)


def refusal_of(group: str) -> str:
    """Return the reason why shards of ``group`` can never commit in two phases; "" if they can.

    The reason is a part of a sentence, for error messages.
    """
    alias: Any = connections[group]
    return str(alias.two_phase_refusal)
