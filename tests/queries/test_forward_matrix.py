"""Foreign keys and one-to-one relations: read, assigned, compared with and prefetched.

As in ``test_relation_matrix``, each call has the result of the twin in one database, or is refused
with a remedy and without a write. The refused calls are listed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from django.db import DatabaseError
from django.db.models import Count, Prefetch

from tests.queries.conftest import DATABASES, NEAR, ONE, TWO
from tests.queries.twins import REMEDIES, World, all_rows, outcome

pytestmark = [pytest.mark.every_backend, pytest.mark.django_db(databases=DATABASES)]


@dataclass(frozen=True)
class Field:
    """A relation ``model.name`` of ``row``, with rows that can be related and rows that cannot."""

    model: str
    name: str
    row: int
    target: str
    #: The related row of ``row``, another possible one, and one on another shard.
    own: int
    other: int
    elsewhere: int
    #: The name on the other side.
    accessor: str

    def targets(self, world: World) -> Any:
        return getattr(world.models, self.target)

    def rows(self, world: World) -> Any:
        return getattr(world.models, self.model)


FIELDS = {
    f"{model}.{name}" if name != "content_object" else f"{model} of {rest[1]}": Field(
        model, name, *rest
    )
    for model, name, *rest in (
        ("Item", "owner", 101, "Agent", ONE, NEAR, TWO, "items"),
        ("Item", "buyer", 104, "Agent", ONE, NEAR, TWO, "bought"),
        ("Item", "city", 101, "City", 5, 6, 6, "items"),
        ("Item", "shelf", 101, "Shelf", 11, 14, 12, "items"),
        ("Item", "parent", 104, "Item", 101, 105, 102, "children"),
        ("Passport", "owner", 31, "Agent", ONE, NEAR, TWO, "passport"),
        ("Badge", "holder", 41, "Agent", ONE, NEAR, TWO, "badge"),
        ("Cover", "item", 51, "Item", 101, 104, 102, "cover"),
        ("Note", "content_object", 61, "Item", 101, 104, 102, "notes"),
        ("Note", "content_object", 66, "Agent", TWO, ONE, NEAR, "remarks"),
        ("Memo", "content_object", 71, "Passport", 32, 31, 31, "memos"),
    )
}

Action = Callable[[World, Field], Any]


def _row(world: World, field: Field) -> Any:
    return world.of(field.model, field.row)


def _assigned(world: World, field: Field, pk: int | None) -> Any:
    row = _row(world, field)
    setattr(row, field.name, None if pk is None else world.of(field.target, pk))
    row.save()
    return row


def _new(world: World, field: Field, pk: int, target: int) -> dict[str, Any]:
    owner = world.of("Agent", ONE)
    values: dict[str, Any] = {"id": pk, "name": "new", "owner": owner}
    if field.model == "Item":
        values["seller"] = owner
    return {**values, field.name: world.of(field.target, target)}


def _seen(rows: Any, name: str) -> Any:
    found = []
    for row in rows:
        value = getattr(row, name, None)
        several = sorted(map(repr, value.all())) if hasattr(value, "all") else repr(value)
        found.append((row.pk, several))
    return sorted(found)


def _reverse(world: World, field: Field, queryset: Any = None) -> Any:
    lookup = field.accessor if queryset is None else Prefetch(field.accessor, queryset)
    targets = all_rows(field.targets(world), world).prefetch_related(lookup)
    return _seen(targets, field.accessor)


ACTIONS: dict[str, Action] = {
    "read": lambda world, field: getattr(_row(world, field), field.name),
    "assign": lambda world, field: _assigned(world, field, field.other),
    "assign the same": lambda world, field: _assigned(world, field, field.own),
    "assign one of another shard": lambda world, field: _assigned(world, field, field.elsewhere),
    "assign None": lambda world, field: _assigned(world, field, None),
    "create": lambda world, field: field.rows(world).objects.create(
        **_new(world, field, 900, field.other)
    ),
    "create with one of another shard": lambda world, field: field.rows(world).objects.create(
        **_new(world, field, 900, field.elsewhere)
    ),
    "bulk_create": lambda world, field: field.rows(world).objects.bulk_create(
        [field.rows(world)(**_new(world, field, 900, field.other))]
    ),
    "bulk_create with one of another shard": lambda world, field: field.rows(
        world
    ).objects.bulk_create([field.rows(world)(**_new(world, field, 900, field.elsewhere))]),
    "get_or_create": lambda world, field: field.rows(world).objects.get_or_create(
        **_new(world, field, 900, field.other)
    ),
    "update": lambda world, field: (
        field.rows(world)
        .objects.filter(owner=_row(world, field).owner_id)
        .update(**{field.name: world.of(field.target, field.elsewhere)})
    ),
    "filter by the instance": lambda world, field: field.rows(world).objects.filter(
        **{field.name: world.of(field.target, field.own)}
    ),
    "filter by instances": lambda world, field: field.rows(world).objects.filter(
        **{f"{field.name}__in": [world.of(field.target, pk) for pk in (field.own, field.elsewhere)]}
    ),
    "filter by the value": lambda world, field: field.rows(world).objects.filter(
        **{field.name: field.own}
    ),
    "filter everything by the value": lambda world, field: all_rows(
        field.rows(world), world
    ).filter(**{field.name: field.own}),
    "filter by NULL": lambda world, field: all_rows(field.rows(world), world).filter(
        **{f"{field.name}__isnull": False}
    ),
    "exclude the instance": lambda world, field: all_rows(field.rows(world), world).exclude(
        **{field.name: world.of(field.target, field.own)}
    ),
    "join": lambda world, field: all_rows(field.rows(world), world).filter(
        **{f"{field.name}__name__contains": "1"}
    ),
    "group by it": lambda world, field: list(
        all_rows(field.rows(world), world)
        .values(field.name)
        .annotate(n=Count("pk"))
        .order_by(field.name)
    ),
    "select_related": lambda world, field: _seen(
        all_rows(field.rows(world), world).select_related(field.name), field.name
    ),
    "prefetch_related": lambda world, field: _seen(
        all_rows(field.rows(world), world).prefetch_related(field.name), field.name
    ),
    "prefetch by a queryset": lambda world, field: _seen(
        all_rows(field.rows(world), world).prefetch_related(
            Prefetch(field.name, all_rows(field.targets(world), world))
        ),
        field.name,
    ),
    "prefetch the other side": _reverse,
    "prefetch the other side by a queryset": lambda world, field: _reverse(
        world, field, all_rows(field.rows(world), world)
    ),
    "read the other side": lambda world, field: (
        [
            getattr(world.of(field.target, pk), field.accessor, "none")
            for pk in (field.own, field.other)
        ]
        if field.accessor in ("passport", "badge", "cover")
        else None
    ),
    "join from the other side": lambda world, field: all_rows(field.targets(world), world).filter(
        **{f"{field.accessor}__name__contains": "1"}
    ),
    "delete the row": lambda world, field: _row(world, field).delete(),
    "delete what it refers to": lambda world, field: world.of(field.target, field.own).delete(),
}


#: A query of two databases; a shard key that would change; a row on another shard.
OUTSIDE = {"join", "select_related", "join from the other side"}
KEY = {"assign", "assign one of another shard", "assign None", "update"}
ELSEWHERE = {
    "assign one of another shard",
    "create with one of another shard",
    "bulk_create with one of another shard",
    "update",
}
#: The related row may be on any shard, and nothing names the shard.
UNBOUND = {
    "filter by the instance",
    "filter by instances",
    "filter by the value",
    "prefetch the other side",
}
REFUSED = {
    "Item.owner": OUTSIDE | KEY,
    "Passport.owner": OUTSIDE | KEY,
    "Item.buyer": OUTSIDE | UNBOUND,
    "Item.city": (OUTSIDE | UNBOUND) - {"join from the other side"},
    "Badge.holder": OUTSIDE | UNBOUND | {"read the other side"},
    "Item.shelf": ELSEWHERE | {"filter by the value"},
    "Item.parent": ELSEWHERE | {"filter by the value"},
    "Cover.item": ELSEWHERE | {"filter by the value"},
    "Note of Item": ELSEWHERE,
    "Note of Agent": {
        "prefetch the other side",
        "join from the other side",
        "delete what it refers to",
    },
    "Memo of Passport": {
        "read",
        "prefetch_related",
        "join from the other side",
        "delete what it refers to",
    },
}


#: Not refused by us: a plain Django model. The global database has no such table.
REFUSED_BY_THE_DATABASE = {("Item.city", "join from the other side")}


@pytest.mark.parametrize("name", FIELDS)
def test_as_on_one_database_or_refused(worlds: tuple[World, World], name: str) -> None:
    field = FIELDS[name]
    before = worlds[1].rows()
    wrong = []
    for label, action in ACTIONS.items():
        expected, got = (
            outcome(world, lambda world: action(world, field), writes=True)  # noqa: B023
            for world in worlds
        )
        if (name, label) in REFUSED_BY_THE_DATABASE:
            if not isinstance(got.error, DatabaseError):
                wrong.append(f"{label}: not refused: {got.value!r}, {got.error!r}")
        elif got.is_refusal != (label in REFUSED[name]):
            wrong.append(f"{label}: refused without need, or not refused: {got.error!r}")
        elif got.is_refusal:
            if got.rows != before:
                wrong.append(f"{label}: refused, and rows were written: {got.error!r}")
            if not any(remedy in str(got.error) for remedy in REMEDIES):
                wrong.append(f"{label}: no remedy: {got.error!r}")
        elif got.comparable() != expected.comparable():
            wrong.append(f"{label}: {got.value!r}, {got.error!r}; not {expected.comparable()!r}")
        elif got.rows != expected.rows:
            wrong.append(f"{label}: other rows: {got.rows!r}; not {expected.rows!r}")
    assert not wrong, "\n".join(wrong)
