"""Whether a site and its groups can use blocks in two phases."""

from __future__ import annotations

from typing import Any, Final

from django.apps import apps
from django.db import connections

#: The app with the tables of decisions.
APP: Final = "sharded_orm.contrib.two_phase"


def is_enabled() -> bool:
    """Whether the site has the app with the tables of decisions."""
    return apps.is_installed(APP)


def refusal_of(group: str) -> str:
    """Return why shards of ``group`` can never commit in two phases; "" if their servers can."""
    alias: Any = connections[group]
    return str(alias.two_phase_refusal)
