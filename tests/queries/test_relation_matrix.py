"""Every method of related managers and querysets: the result of one database, or a refusal.

Each call runs on rows in one plain database and on their twins on shards. It gives the same result
and leaves the same rows; or it raises an error of the library that names a remedy, and nothing
has been written. The refused calls are listed here: a call that is refused without need fails, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from django.db import connection
from django.db.models import QuerySet

from tests.queries.calls import CALLS, NOT_OF_ROWS, SLOWLY, WRITING, Call, Case, Relation
from tests.queries.conftest import DATABASES, NEAR, ONE, TWO
from tests.queries.twins import GLOBAL, REMEDIES, Asynchronous, Outcome, World, outcome
from tests.relatives.plain import models as plain_models

pytestmark = [pytest.mark.django_db(databases=DATABASES)]

AGENT = ("Agent", ONE)
RELATIONS = {
    relation.name: relation
    for relation in (
        Relation("the key", "items", AGENT, "Item", "owner", (101, 104), 106, 102),
        Relation("second, nullable", "bought", AGENT, "Item", "buyer", (104, 102), 101, 106),
        Relation("second", "sold", AGENT, "Item", "seller", (101, 102), 104, 106),
        Relation("inside the group", "items", ("Shelf", 11), "Item", "shelf", (101, 104), 105, 102),
        Relation("to a global model", "items", ("City", 5), "Item", "city", (101, 102), 104, 106),
        Relation("self", "children", ("Item", 101), "Item", "parent", (104, 105), 107, 106),
        Relation("many-to-many", "labels", ("Item", 101), "Label", None, (21, 24), 25, 22),
        Relation("its other side", "items", ("Label", 21), "Item", None, (101, 104), 105, 102),
        Relation("many-to-many self", "friends", ("Item", 101), "Item", None, (104,) * 2, 105, 102),
        Relation("generic", "notes", ("Item", 101), "Note", "content_object", (61, 62), 67, 63),
        Relation(
            "generic, of a global row",
            "remarks",
            ("Agent", TWO),
            "Note",
            "content_object",
            (65, 66),
            67,
            63,
        ),
        Relation(
            "generic, global rows",
            "memos",
            ("Passport", 30 + TWO),
            "Memo",
            "content_object",
            (71, 72),
            77,
            73,
        ),
        Relation("no relation", "", None, "Item", None, (101, 102), 104, 106),
    )
}
#: Their rows are on the shard of the source.
BESIDE = {
    "inside the group",
    "self",
    "many-to-many",
    "its other side",
    "many-to-many self",
    "generic",
}
#: The ways in which the calls get their rows.
WAYS = {
    "": lambda rows, sharded: rows,
    "all": lambda rows, sharded: rows.all(),
    "key": lambda rows, sharded: rows.filter(owner=ONE),
    "keys": lambda rows, sharded: rows.filter(owner__in=[ONE, TWO, NEAR]),
    "scatter": lambda rows, sharded: rows.scatter() if sharded else rows.all(),
}
#: Of them: one shard, and many shards merged. Servers have only these, as the SQL of others does not differ.
BY_SQL = ("", "scatter")
#: The ways whose asynchronous methods are called.
LATER = ("", "keys")


def _names(kind: type) -> set[str]:
    return {
        name for name in dir(kind) if not name.startswith("_") and callable(getattr(kind, name))
    }


def _placed(name: str) -> bool:
    return name in CALLS or name in NOT_OF_ROWS or (name[0] == "a" and name[1:] in CALLS)


def test_every_method_of_django_is_called(placed: None) -> None:
    """Add a method of a later version of Django to ``calls.py``."""
    world = World(plain_models, None)
    world.fill()
    names = _names(QuerySet)
    for relation in RELATIONS.values():
        names |= _names(type(relation.rows(world)))
    assert not {name for name in names if not _placed(name)}
    assert not {name for name in CALLS if name not in names}


def cells(rows: Any, *, later: bool) -> list[tuple[str, str, Call]]:
    """Return method, name and call for all calls of the methods that ``rows`` has."""
    return [
        (method, f"{method} ({label})" if label else method, call)
        for method, calls in CALLS.items()
        if hasattr(rows, f"a{method}" if later else method)
        for label, call in calls.items()
    ]


# -- Refused calls ---------------------------------------------------------------------

#: Refused by all: a join that leaves the group, a changed key, a row without a key.
EVERYWHERE = {
    "filter (joined)",
    "select_related (a global row)",
    "update (the key)",
    "create (without a key)",
}
#: Results that cannot be merged, and calls that must know their one shard.
SEVERAL = {
    "union",
    "intersection",
    "difference",
    "extra",
    "raw",
    "select_for_update",
    "get_or_create (by the primary key)",
    "update_or_create (by the primary key)",
}
#: Calls that name the shards themselves: the rest of reading without a bound.
BOUND = {
    "none",
    "filter (key)",
    "filter (keys)",
    "filter (instance of the key)",
    "filter (or)",
    "complex_filter (Q)",
    "get (key)",
    "get (nothing)",
    "get (several)",
    "contains (a row of it)",
    "contains (another)",
    "contains (one of another shard)",
}
ALL = {
    f"{method} ({label})" if label else method for method, calls in CALLS.items() for label in calls
}
UNBOUND = SEVERAL | {
    cell
    for cell in ALL
    if cell in ("update", "delete") or (cell.split()[0] not in WRITING and cell not in BOUND)
}
#: Refused by related managers: rows of another key, or of another shard.
OF_THE_KEY = {
    "add",
    "add (of another shard)",
    "set",
    "set (cleared first)",
    "set (of another shard)",
}
NOT_BESIDE = {
    "create (for another key)",
    "get_or_create (for another key)",
    "update_or_create (for another key)",
    "add (of another shard)",
    "set (of another shard)",
    "remove (of another shard)",
}
#: Refused by managers of many-to-many relations, which also take primary keys.
NOT_THERE = {
    "add (new)",
    "add (primary key of another shard)",
    "set (primary key of another shard)",
}
#: Refused by querysets of the row that the key refers to, which do not set the key.
WITHOUT_KEY = {
    f"{method} ({label})" if label else method
    for method in ("create", "get_or_create", "update_or_create")
    for label in ("", "new", "for another key")
}


#: Refused by a queryset of global rows: the rows that they are about may be on any shard.
OUTSIDE = {"prefetch_related (rows beside)", "prefetch_related (by a queryset)"}


def refusals(relation: Relation, way: str) -> set[str]:
    if relation.model in GLOBAL:
        return OUTSIDE
    found = set(EVERYWHERE)
    if relation.model in ("Label", "Note"):
        found.add("select_related")  # follows the key
    if relation.name == "the key":
        if way == "":  # the manager sets it
            return (found | OF_THE_KEY) - {"create (without a key)"}
        return found | WITHOUT_KEY
    if relation.name in BESIDE:
        if way == "":  # the manager sets the key
            found = (found | NOT_BESIDE) - {"create (without a key)"}
            if relation.field is None:
                found |= NOT_THERE
        return found
    if way in ("", "all"):
        found |= UNBOUND
    if way in ("keys", "scatter"):
        found |= SEVERAL
    if way == "" and relation.field in ("buyer", "city", "content_object"):
        found |= {cell for cell in ALL if cell.split()[0] in ("clear", "set")}
    return found


def _without_bulk(cell: str) -> str:
    return cell.replace(f", {SLOWLY}", "").replace(f" ({SLOWLY})", "")


# -- The comparison --------------------------------------------------------------------

#: What calls did in the plain database, by relation, way and cell. Each test has the same rows there, and
#: Django's asynchronous methods do what the synchronous ones do.
_on_one_database: dict[tuple[str, str, str], Expected] = {}

#: One relation of each kind of manager: asynchronous methods call the others, of managers and of
#: querysets on several shards.
_AWAITED = {"the key", "to a global model", "many-to-many", "generic", "no relation"}


@pytest.mark.every_backend
@pytest.mark.parametrize("name", RELATIONS)
def test_as_on_one_database_or_refused(worlds: tuple[World, World], name: str) -> None:
    ways = WAYS if connection.vendor == "sqlite" else BY_SQL
    _compare(worlds, RELATIONS[name], ways, later=False)


@pytest.mark.parametrize(
    "name",
    [
        name if name in _AWAITED else pytest.param(name, marks=pytest.mark.long)
        for name in RELATIONS
    ],
)
def test_asynchronous_methods(worlds: tuple[World, World], name: str) -> None:
    _compare(worlds, RELATIONS[name], LATER, later=True)


def _compare(
    worlds: tuple[World, World], relation: Relation, ways: Iterable[str], *, later: bool
) -> None:
    # What a call has written is undone, so one set of rows is enough for all calls.
    before = worlds[1].rows()
    assert before == worlds[0].rows()
    wrong = [
        f"{way or 'manager'}: {difference}"
        for way in ways
        for difference in _differences(worlds, relation, way, before, later=later)
    ]
    assert not wrong, "\n".join(wrong)


def _differences(
    worlds: tuple[World, World],
    relation: Relation,
    way: str,
    before: dict[str, list[Any]],
    *,
    later: bool,
) -> Iterator[str]:
    theirs, ours = (WAYS[way](relation.rows(world), world.aliases is not None) for world in worlds)
    for method in CALLS:
        if hasattr(ours, method) != hasattr(theirs, method):
            yield f"{method}: one of the two managers has it, the other has not"
    to_refuse = refusals(relation, way)
    for method, cell, call in cells(theirs, later=later):
        if SLOWLY in cell and relation.field is None:
            continue  # a many-to-many relation has no such argument
        expected = _expected(worlds[0], relation, way, method, cell, call)
        got = _run(worlds[1], relation, way, method, call, later=later)
        if got.is_refusal != (_without_bulk(cell) in to_refuse):
            yield f"{cell}: refused without need, or not refused: {got.error!r}"
        elif got.is_refusal:
            if method in WRITING and got.rows != before:
                yield f"{cell}: refused, and rows were written: {got.error!r}"
            if not any(remedy in str(got.error) for remedy in REMEDIES):
                yield f"{cell}: no remedy: {got.error!r}"
        elif got.comparable() != expected.comparable:
            yield f"{cell}: {got.value!r}, {got.error!r}; not {expected.comparable!r}"
        elif got.rows != expected.rows:
            yield f"{cell}: other rows: {got.rows!r}; not {expected.rows!r}"


@dataclass(frozen=True)
class Expected:
    """What must be equal on shards: the result or the class of the error, and the rows."""

    comparable: tuple[Any, str | None]
    rows: dict[str, list[Any]]


def _expected(
    world: World, relation: Relation, way: str, method: str, cell: str, call: Call
) -> Expected:
    # In one database, both are rows.all().
    place = relation.name, "all" if way == "scatter" else way, cell
    if place not in _on_one_database:
        got = _run(world, relation, way, method, call, later=False)
        _on_one_database[place] = Expected(got.comparable(), got.rows)
    return _on_one_database[place]


def _run(
    world: World, relation: Relation, way: str, method: str, call: Call, *, later: bool
) -> Outcome:
    def on(world: World) -> Any:
        rows = WAYS[way](relation.rows(world), world.aliases is not None)
        return call(Asynchronous(rows, method) if later else rows, Case(world, relation))

    return outcome(world, on, writes=method in WRITING)
