"""Records which lookups are "served": queries may rely on them, because all rows have their entries."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from django.conf import settings
from django.db import DEFAULT_DB_ALIAS, connections
from django.utils.timezone import now

from sharded_orm.contrib.lookups.declaration import ModelLookup, lookups_by_name
from sharded_orm.contrib.lookups.exceptions import LookupRefused
from sharded_orm.contrib.lookups.models import LookupState

# The lookups on which queries may rely, as this process has read. The process does not read them
# again: a lookup is withdrawn only after all processes have ceased to use it, see
# docs/howto/lookups.md.
_served: set[tuple[str, bool, str | None]] = set()


def is_served(lookup: ModelLookup) -> bool:
    """Whether queries may rely on ``lookup`` as it is declared now.

    Costs one query to the global database, until the answer is yes, which the process remembers.

    A changed declaration may give the entries another form or another table. So the answer is then
    no, until the lookup is built again.
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
    """Whether this process knows already that queries may rely on ``lookup``. Sends no query."""
    return _declaration(lookup) in _served


def refuse_other_table(lookups: Iterable[ModelLookup]) -> None:
    """Refuse to write entries while queries of other processes may rely on entries in a different
    table, where they would not find the new entries. One query for each lookup.

    :param lookups: lookups that queries may not rely on yet, as far as this process knows.
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
    """Record that queries may rely on ``lookup``, because all rows have their entries."""
    # Do not use update_or_create(), which reads before it writes: on SQLite, the write fails if
    # another connection writes in between.
    LookupState(
        lookup=lookup.name,
        served_since=now(),
        unique=lookup.unique,
        table=lookup.table_name or "",
    ).save(using=DEFAULT_DB_ALIAS)


def withdraw(name: str) -> str | None:
    """Record that queries may not rely on the lookup ``name``. Other processes may still rely on it.

    :returns: the label of the model that stored the entries when queries last relied on the lookup;
        "" for the table of the global database; None if queries never relied on it.
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
    """Record that queries may not rely on lookups that no model declares any more.

    In a test database, also record that queries may rely on all declared lookups: it is new, so
    each row gets its entries as it is written.

    This is a receiver of ``post_migrate``, which Django also sends after a flush.
    """
    if using != DEFAULT_DB_ALIAS:
        return
    declared = lookups_by_name()
    # Keep the rows of :class:`LookupState`: they name the tables of the entries for 'manage.py
    # lookups drop'.
    LookupState.objects.using(using).exclude(lookup__in=declared).update(served_since=None)
    if _is_test_database():
        for lookup in declared.values():
            serve(lookup)


_NAME = settings.DATABASES[DEFAULT_DB_ALIAS]["NAME"]


def _is_test_database() -> bool:
    """Whether a test run has replaced the global database by a test database."""
    return bool(connections[DEFAULT_DB_ALIAS].settings_dict["NAME"] != _NAME)
