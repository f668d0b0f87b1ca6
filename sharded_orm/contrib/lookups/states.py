"""Which lookups are served: all rows have their entries, so queries may rely on them."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.db import DEFAULT_DB_ALIAS, connections
from django.utils.timezone import now

from sharded_orm.contrib.lookups.declaration import ModelLookup, lookups_by_name
from sharded_orm.contrib.lookups.models import LookupState

# The lookups that this process has found served, as they are declared. None is ever withdrawn while
# processes use it, see docs/howto/lookups.md.
_served: set[tuple[str, bool, str | None]] = set()


def is_served(lookup: ModelLookup) -> bool:
    """Whether ``lookup`` is served as it is declared. One query, until it is served.

    The entries of unique lookups differ from others, and may be in another table. So a lookup is built again
    if its declaration has changed.
    """
    if is_known_to_be_served(lookup):
        return True
    states = LookupState.objects.using(DEFAULT_DB_ALIAS)
    if not states.filter(
        lookup=lookup.name,
        unique=lookup.unique,
        table=lookup.table_name or "",
        served_since__isnull=False,
    ).exists():
        return False
    _served.add(_declaration(lookup))
    return True


def is_known_to_be_served(lookup: ModelLookup) -> bool:
    """Whether this process has found ``lookup`` served. Sends nothing."""
    return _declaration(lookup) in _served


def _declaration(lookup: ModelLookup) -> tuple[str, bool, str | None]:
    return lookup.name, lookup.unique, lookup.table_name


def serve(lookup: ModelLookup) -> None:
    """Note that all rows have their entries in ``lookup``."""
    LookupState.objects.using(DEFAULT_DB_ALIAS).update_or_create(
        lookup=lookup.name,
        defaults={
            "served_since": now(),
            "unique": lookup.unique,
            "table": lookup.table_name or "",
        },
    )


def withdraw(name: str) -> None:
    """Note that queries may not rely on the lookup ``name``. Other processes may rely on it still."""
    _served.difference_update([served for served in list(_served) if served[0] == name])
    LookupState.objects.using(DEFAULT_DB_ALIAS).filter(lookup=name).delete()


def after_migrate(*, using: str, **kwargs: Any) -> None:
    """Withdraw lookups that no model declares any more; serve all in test databases, which are new.

    A receiver of ``post_migrate``, which Django also sends after a flush.
    """
    if using != DEFAULT_DB_ALIAS:
        return
    declared = lookups_by_name()
    LookupState.objects.using(using).exclude(lookup__in=declared).delete()
    if _is_test_database():
        for lookup in declared.values():
            serve(lookup)


_NAME = settings.DATABASES[DEFAULT_DB_ALIAS]["NAME"]


def _is_test_database() -> bool:
    """Whether a test run has replaced the global database by a test database."""
    return bool(connections[DEFAULT_DB_ALIAS].settings_dict["NAME"] != _NAME)
