"""One or more calls of every public method of Django's managers and querysets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from django.contrib.contenttypes.prefetch import GenericPrefetch
from django.db import models
from django.db.models import Count, F, Max, Prefetch, Q, Sum

from tests.queries.conftest import NEAR, ONE, START, TWO
from tests.queries.twins import GLOBAL, World
from tests.versions import HAS_FETCH_MODES


@dataclass(frozen=True)
class Relation:
    """The related rows that a call uses: ``source.accessor``."""

    name: str
    accessor: str
    source: tuple[str, Any] | None
    #: The model of the related rows, and its field that the manager sets by itself.
    model: str
    field: str | None
    #: Primary keys of two related rows, of an unrelated row on the shard of the first, and of an
    #: unrelated row on another shard.
    members: tuple[int, int]
    stranger: int
    elsewhere: int

    @property
    def is_generic(self) -> bool:
        return self.field == "content_object"

    def rows(self, world: World) -> Any:
        if self.source is None:
            return getattr(world.models, self.model).objects
        return getattr(world.of(*self.source), self.accessor)


@dataclass(frozen=True)
class Case:
    """What a call may use of one set of models."""

    world: World
    relation: Relation

    def row(self, pk: int) -> Any:
        return self.world.of(self.relation.model, pk)

    @property
    def member(self) -> Any:
        return self.row(self.relation.members[0])

    @property
    def stranger(self) -> Any:
        return self.row(self.relation.stranger)

    @property
    def elsewhere(self) -> Any:
        return self.row(self.relation.elsewhere)

    def new(self, owner: int | None = ONE, pk: int = 900, **values: Any) -> dict[str, Any]:
        """Values of a row that does not exist yet."""
        agents = {key: self.world.of("Agent", key) for key in (ONE, TWO, NEAR)}
        columns = {"id": pk, "name": f"new {pk}", "posted_at": START, **values}
        if owner is not None:
            columns["owner"] = agents[owner]
        if self.relation.model == "Item":
            columns["seller"] = agents[NEAR]
        columns.pop(self.relation.field or "", None)
        return columns

    def without_key(self) -> dict[str, Any]:
        """Values of a row that gets its key from the row that it is related to.

        A model that is not sharded has no shard key that could be given, so its values have it.
        """
        is_sharded = hasattr(getattr(self.world.models, self.relation.model), "ShardMeta")
        return self.new(None if is_sharded else ONE)

    def made(self, **values: Any) -> Any:
        return getattr(self.world.models, self.relation.model)(**self.new(**values))

    def complete(self, **values: Any) -> Any:
        """A new row with all values, including the one that the manager would set."""
        row = self.made(**values)
        for name in ("owner", "seller"):
            if hasattr(type(row), name) and getattr(row, f"{name}_id") is None:
                setattr(row, name, self.world.of("Agent", ONE))
        return row

    def models(self, name: str) -> Any:
        return getattr(self.world.models, name)


Call = Callable[[Any, Case], Any]


def _changed(rows: list[Any], **values: Any) -> list[Any]:
    for row in rows:
        for name, value in values.items():
            setattr(row, name, value)
    return rows


def _names(rows: Any, *path: str) -> Any:
    """Return the primary key of each row with its prefetched rows under ``path``."""

    def follow(row: Any, names: tuple[str, ...]) -> Any:
        if not names:
            return row
        step = getattr(row, names[0])
        if hasattr(step, "all"):
            return sorted((repr(follow(each, names[1:])) for each in step.all()), key=repr)
        return follow(step, names[1:]) if step is not None else None

    return sorted(((row.pk, str(follow(row, path))) for row in rows), key=repr)


#: The calls of each method, by name.
CALLS: dict[str, dict[str, Call]] = {
    # -- More conditions -----------------------------------------------------------
    "all": {"": lambda rows, case: rows.all()},
    "none": {"": lambda rows, case: rows.none()},
    "filter": {
        "column": lambda rows, case: rows.filter(stars__gte=1),
        "key": lambda rows, case: rows.filter(owner=ONE),
        "instance of the key": lambda rows, case: rows.filter(owner=case.world.of("Agent", TWO)),
        "keys": lambda rows, case: rows.filter(owner__in=[ONE, TWO, NEAR]),
        "primary key": lambda rows, case: rows.filter(pk=case.relation.members[0]),
        "joined": lambda rows, case: rows.filter(owner=ONE, owner__name="agent 1"),
        "or": lambda rows, case: rows.filter(Q(owner=ONE) | Q(owner=TWO, stars__gt=0)),
    },
    "exclude": {
        "column": lambda rows, case: rows.exclude(stars__gte=1),
        "key": lambda rows, case: rows.exclude(owner=ONE),
    },
    "complex_filter": {
        "": lambda rows, case: rows.complex_filter({"stars__gte": 1}),
        "Q": lambda rows, case: rows.complex_filter(Q(owner=ONE)),
    },
    "annotate": {
        "": lambda rows, case: [r.more for r in rows.annotate(more=F("stars") + 1).order_by("pk")],
        "groups": lambda rows, case: rows.values("stars").annotate(n=Count("pk")).order_by("stars"),
    },
    "alias": {"": lambda rows, case: rows.alias(more=F("stars") + 1).filter(more__gt=1)},
    "order_by": {
        "": lambda rows, case: rows.order_by("-stars", "pk"),
        "slice": lambda rows, case: list(rows.order_by("-posted_at", "pk")[1:3]),
    },
    "reverse": {"": lambda rows, case: rows.order_by("pk").reverse()},
    "distinct": {"": lambda rows, case: rows.values_list("stars").distinct()},
    "values": {"": lambda rows, case: rows.values("pk", "name")},
    "values_list": {"": lambda rows, case: rows.values_list("name", flat=True)},
    "dates": {"": lambda rows, case: list(rows.dates("posted_at", "month"))},
    "datetimes": {"": lambda rows, case: list(rows.datetimes("posted_at", "day"))},
    "defer": {"": lambda rows, case: rows.defer("name")},
    "only": {"": lambda rows, case: rows.only("name")},
    "extra": {"": lambda rows, case: rows.extra(where=["stars > 0"])},  # type: ignore[dict-item]
    "using": {"the group": lambda rows, case: rows.using(_home(case))},
    "select_related": {
        "": lambda rows, case: rows.select_related(_inner(case)),
        "a global row": lambda rows, case: rows.select_related("owner"),
    },
    "prefetch_related": {
        "a global row": lambda rows, case: _names(rows.prefetch_related("owner"), "owner"),
        "rows beside": lambda rows, case: _names(rows.prefetch_related(_many(case)), _many(case)),
        "by a queryset": lambda rows, case: _names(
            rows.prefetch_related(
                GenericPrefetch(_many(case), [_target(case).objects.order_by("pk")])
                if case.relation.is_generic
                else Prefetch(_many(case), _target(case).objects.order_by("pk"))
            ),
            _many(case),
        ),
    },
    "select_for_update": {"": lambda rows, case: rows.select_for_update()},
    # -- Reading ---------------------------------------------------------------------
    "get": {
        "": lambda rows, case: rows.get(pk=case.relation.members[0]),
        "key": lambda rows, case: rows.get(pk=case.relation.members[0], owner=ONE),
        "nothing": lambda rows, case: rows.get(pk=-1, owner=ONE),
        "several": lambda rows, case: rows.get(owner__in=[ONE, TWO, NEAR]),
    },
    "first": {"": lambda rows, case: rows.first()},
    "last": {"": lambda rows, case: rows.last()},
    "earliest": {"": lambda rows, case: rows.earliest("posted_at", "pk")},
    "latest": {"": lambda rows, case: rows.latest("posted_at", "pk")},
    "in_bulk": {
        "": lambda rows, case: rows.in_bulk(),
        "ids": lambda rows, case: rows.in_bulk([*case.relation.members, case.relation.stranger]),
    },
    "iterator": {"": lambda rows, case: sorted(rows.iterator(chunk_size=2), key=repr)},
    "count": {"": lambda rows, case: rows.count()},
    "exists": {"": lambda rows, case: rows.exists()},
    "contains": {
        "a row of it": lambda rows, case: rows.contains(case.member),
        "another": lambda rows, case: rows.contains(case.stranger),
        "one of another shard": lambda rows, case: rows.contains(case.elsewhere),
    },
    "aggregate": {
        "": lambda rows, case: rows.aggregate(n=Count("pk"), top=Max("stars"), sum=Sum("stars"))
    },
    "explain": {"": lambda rows, case: bool(rows.explain())},
    "raw": {
        "": lambda rows, case: list(
            rows.raw(
                f"SELECT * FROM {case.models(case.relation.model)._meta.db_table} WHERE id = %s",
                [case.relation.members[0]],
            )
        )
    },
    "union": {"": lambda rows, case: rows.filter(stars=1).union(rows.filter(stars=0))},
    "intersection": {"": lambda rows, case: rows.intersection(rows.filter(stars__gt=0))},
    "difference": {"": lambda rows, case: rows.difference(rows.filter(stars__gt=0))},
    # -- Writing -----------------------------------------------------------------------
    "create": {
        "": lambda rows, case: rows.create(**case.new()),
        "for another key": lambda rows, case: rows.create(**case.new(TWO)),
        "without a key": lambda rows, case: rows.create(**case.without_key()),
    },
    "get_or_create": {
        "new": lambda rows, case: rows.get_or_create(**case.new()),
        "for another key": lambda rows, case: rows.get_or_create(**case.new(TWO)),
        "there": lambda rows, case: rows.get_or_create(**_lookup(case)),
        "by the primary key": lambda rows, case: rows.get_or_create(
            defaults=case.new(), pk=case.relation.members[0]
        ),
    },
    "update_or_create": {
        "new": lambda rows, case: rows.update_or_create(defaults={"stars": 9}, **case.new()),
        "for another key": lambda rows, case: rows.update_or_create(
            defaults={"stars": 9}, **case.new(TWO)
        ),
        "there": lambda rows, case: rows.update_or_create(defaults={"stars": 9}, **_lookup(case)),
        "by the primary key": lambda rows, case: rows.update_or_create(
            defaults={"stars": 9}, pk=case.relation.members[0]
        ),
    },
    "bulk_create": {
        "": lambda rows, case: rows.bulk_create(
            [case.complete(owner=TWO), case.complete(pk=901), case.complete(owner=NEAR, pk=902)]
        )
    },
    "bulk_update": {
        "": lambda rows, case: rows.bulk_update(
            _changed([case.member, case.elsewhere, case.stranger], stars=7), ["stars"]
        )
    },
    "update": {
        "": lambda rows, case: rows.update(stars=F("stars") + 10),
        "the key": lambda rows, case: rows.update(owner=TWO),
    },
    "delete": {"": lambda rows, case: rows.all().delete()},
    "add": {
        "": lambda rows, case: rows.add(case.stranger, case.member),
        "of another shard": lambda rows, case: rows.add(case.stranger, case.elsewhere),
        "new": lambda rows, case: rows.add(case.made()),
        "primary key": lambda rows, case: rows.add(case.relation.stranger),
        "primary key of another shard": lambda rows, case: rows.add(
            case.relation.stranger, case.relation.elsewhere
        ),
    },
    "remove": {
        "": lambda rows, case: rows.remove(case.member),
        "both": lambda rows, case: rows.remove(*map(case.row, case.relation.members)),
        "no row of it": lambda rows, case: rows.remove(case.stranger),
        "of another shard": lambda rows, case: rows.remove(case.elsewhere),
        "primary keys": lambda rows, case: rows.remove(*case.relation.members),
    },
    "clear": {"": lambda rows, case: rows.clear()},
    "set": {
        "nothing": lambda rows, case: rows.set([]),
        "": lambda rows, case: rows.set([case.stranger, case.member]),
        "cleared first": lambda rows, case: rows.set([case.stranger], clear=True),
        "of another shard": lambda rows, case: rows.set([case.member, case.elsewhere]),
        "primary key": lambda rows, case: rows.set([case.relation.stranger]),
        "primary key of another shard": lambda rows, case: rows.set(
            [case.relation.stranger, case.relation.elsewhere]
        ),
    },
}

#: Methods that write; all rows are compared after them.
WRITING = frozenset(list(CALLS)[list(CALLS).index("create") :])

SLOWLY = "bulk=False"
# The calls of those methods that can save each row by itself.
for _name in ("add", "remove", "clear", "set"):
    for _label, _call in list(CALLS[_name].items()):
        if "primary" not in _label:
            CALLS[_name][f"{_label}, {SLOWLY}" if _label else SLOWLY] = (
                lambda rows, case, _name=_name, _call=_call: _call(_Slow(rows, _name), case)
            )


class _Slow:
    def __init__(self, rows: Any, name: str) -> None:
        self._rows, self._name = rows, name

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._rows, name)
        if name != self._name:
            return method
        return lambda *args, **kwargs: method(*args, bulk=False, **kwargs)


def _lookup(case: Case) -> dict[str, Any]:
    """Return a lookup of an existing row by its key, not by the value that the manager sets."""
    owner = {} if case.relation.field == "owner" else {"owner": case.member.owner}
    return {**owner, "pk": case.relation.members[0]}


def _home(case: Case) -> str:
    is_global = case.world.aliases is None or case.relation.model in GLOBAL
    return "default" if is_global else "photos"


def _inner(case: Case) -> str:
    return "shelf" if case.relation.model == "Item" else "owner"


def _many(case: Case) -> str:
    if case.relation.is_generic:
        return "content_object"
    return "labels" if case.relation.model == "Item" else "items"


def _target(case: Case) -> Any:
    return case.models("Label" if case.relation.model == "Item" else "Item")


if HAS_FETCH_MODES:
    CALLS["fetch_mode"] = {
        "a global row": lambda rows, case: _names(_peers(rows), "owner"),
        "a row beside": lambda rows, case: _names(_peers(rows), _inner(case)),
        "deferred": lambda rows, case: [row.name for row in _peers(rows.only("stars"))],
        "none": lambda rows, case: _names(rows.fetch_mode(models.FETCH_RAISE), "owner"),
    }


def _peers(rows: Any) -> Any:
    return rows.order_by("pk").fetch_mode(models.FETCH_PEERS)


#: Public methods that neither read nor write rows.
NOT_OF_ROWS = {
    "as_manager",
    "check",
    "contribute_to_class",
    "db_manager",
    "deconstruct",
    "from_queryset",
    "get_prefetch_cache",
    "get_prefetch_queryset",
    "get_prefetch_querysets",
    "get_queryset",
    "resolve_expression",
    "set_base",
}
