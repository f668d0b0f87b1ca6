"""Records which lookups are "served".

Queries use a served lookup to find rows, because all rows have their entries. A lookup is served
from the moment when ``manage.py lookups build`` has written the entries of all rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from django.conf import settings
from django.db import DEFAULT_DB_ALIAS, connections
from django.utils.timezone import now

from sharded_orm.contrib.lookups.declaration import ModelLookup, lookups_by_name
from sharded_orm.contrib.lookups.exceptions import LookupRefused
from sharded_orm.contrib.lookups.models import LookupState

# The lookups that are served, as far as this process has read. The process never asks again,
# because a lookup must not be withdrawn before all processes have stopped using it; see
# docs/howto/lookups.md.
_served: set[tuple[str, bool, str | None]] = set()


def is_served(lookup: ModelLookup) -> bool:
    """Whether queries can rely on ``lookup`` as it is declared now.

    Costs one query to the global database, until the answer is yes, which the process remembers.

    If the declaration has changed since the lookup was built, the entries may be in another table
    or have another form. The answer is then no, until the lookup is built again.
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
    """Whether this process has read before that ``lookup`` is served, so that queries can use it.

    Sends no query. So the answer may be False although the lookup is served.
    """
    return _declaration(lookup) in _served


def refuse_other_table(lookups: Iterable[ModelLookup]) -> None:
    """Raise an error if queries still rely on entries in another table than the declared one.

    Other processes may still run with an older declaration. Their queries read the other table, and
    would not find the entries that this process writes to the new one. One query for each lookup.

    :param lookups: lookups that are not served, as far as this process knows.
    :raises LookupRefused: queries rely on entries of one of the lookups in a table that is not the
        declared table.
    """
    for lookup in lookups:
        states = LookupState.objects.using(DEFAULT_DB_ALIAS)
        served = states.filter(lookup=lookup.name, served_since__isnull=False)
        other = (
            served.exclude(table=lookup.table_name or "").values_list("table", flat=True).first()
        )
        if other is not None:
            raise LookupRefused(
                f"The lookup {lookup.name!r} has {_named(lookup.table_name)}, and is served with"
                f" {_named(other)}, so neither are its values written nor is it built. When no process"
                f" with the former declaration runs, run 'manage.py lookups drop {lookup.name}' and then"
                f" 'manage.py lookups build {lookup.name}'."
            )


def _named(table: str | None) -> str:
    return f"the table {table!r}" if table else "the table of the global database"


def _declaration(lookup: ModelLookup) -> tuple[str, bool, str | None]:
    return lookup.name, lookup.unique, lookup.table_name


def serve(lookup: ModelLookup) -> None:
    """Record that ``lookup`` is served, so that queries use it. Each row must have its entry."""
    # Do not use update_or_create(), which reads before it writes. On SQLite, the write then fails
    # if another connection has written in between.
    LookupState(
        lookup=lookup.name,
        served_since=now(),
        unique=lookup.unique,
        table=lookup.table_name or "",
    ).save(using=DEFAULT_DB_ALIAS)


def withdraw(name: str) -> str | None:
    """Record that the lookup ``name`` is not served any more.

    A process that has read earlier that the lookup is served does not notice this: it never asks
    again.

    :returns: the table with which the lookup was served last: the label of a model, or "" for the
        table of the global database. None if it was never served.
    """
    _served.difference_update([served for served in list(_served) if served[0] == name])
    states = LookupState.objects.using(DEFAULT_DB_ALIAS).filter(lookup=name)
    states.update(served_since=None)
    return states.values_list("table", flat=True).first()


def forget(name: str) -> None:
    """Delete the state of a lookup that was withdrawn and has no entries any more."""
    states = LookupState.objects.using(DEFAULT_DB_ALIAS)
    states.filter(lookup=name, served_since=None).delete()


def after_migrate(*, using: str, **kwargs: Any) -> None:
    """Record that lookups which no model declares any more are not served.

    In a test database, also record that all declared lookups are served. A test database begins
    without rows, so each row gets its entries when it is written.

    This is a receiver of ``post_migrate``, which Django also sends after a flush.
    """
    if using != DEFAULT_DB_ALIAS:
        return
    declared = lookups_by_name()
    # Do not delete the rows of LookupState: 'manage.py lookups drop' reads from them in which table
    # the entries are.
    LookupState.objects.using(using).exclude(lookup__in=declared).update(served_since=None)
    if _is_test_database():
        for lookup in declared.values():
            serve(lookup)


_NAME = settings.DATABASES[DEFAULT_DB_ALIAS]["NAME"]


def _is_test_database() -> bool:
    """Whether a test run has replaced the global database by a test database."""
    return bool(connections[DEFAULT_DB_ALIAS].settings_dict["NAME"] != _NAME)
