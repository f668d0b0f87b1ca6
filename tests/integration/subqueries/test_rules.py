"""Which subqueries are run and which are refused; nothing can hide one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.contrib.contenttypes.models import ContentType
from django.db import connections, models
from django.db.models import (
    Case,
    CharField,
    Count,
    Exists,
    ExpressionWrapper,
    F,
    FilteredRelation,
    Func,
    IntegerField,
    Lookup,
    Max,
    OuterRef,
    Q,
    Subquery,
    Sum,
    UniqueConstraint,
    Value,
    When,
    Window,
)
from django.db.models.expressions import (  # type: ignore[attr-defined]  # not all in the stubs
    BaseExpression,
    DatabaseDefault,
    RawSQL,
)
from django.db.models.functions import Coalesce, Rank
from django.db.models.lookups import Exact
from django.db.models.sql import AggregateQuery, DeleteQuery, InsertQuery, Query, UpdateQuery
from django.test.utils import CaptureQueriesContext, isolate_apps

from sharded_orm import reads_own_row
from sharded_orm.exceptions import CrossShardRelation, ShardKeyRequired, UnknownExpression
from sharded_orm.models import ShardedModel
from sharded_orm.models.querysets.route import colocation_on
from sharded_orm.models.sharding.expressions import HOLDS_EXPRESSIONS, HOLDS_NAMES, HOLDS_NONE
from sharded_orm.models.sharding.statements import check_constraint, check_insert
from tests.integration.subqueries.conftest import (
    DATABASES,
    PLAIN,
    SHARDED,
    Models,
    aliases,
    rows_of,
)
from tests.photos.models import Album, Comment, Person, Photo
from tests.queries.conftest import ONE
from tests.twins.models import Trunk, Twig
from tests.versions import NOT_YET_IN_QUERIES

pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.django_db(databases=DATABASES),
    pytest.mark.usefixtures("forest"),
]


def largest(models: Models, **where: Any) -> Subquery:
    """The largest id of twigs, as a value."""
    return Subquery(models.twig.objects.filter(**where).order_by("-id").values("id")[:1])


def own(models: Models) -> Any:
    """The twigs of a trunk, by the foreign key."""
    return models.twig.objects.filter(parent=OuterRef("pk"))


def foreign(models: Models) -> Any:
    """The twigs that refer to a trunk by a plain integer: they may be on any shard."""
    return models.twig.objects.filter(ref=OuterRef("pk"))


RIGHT: dict[str, Callable[[Models], Any]] = {
    "tied by the foreign key": lambda m: m.everywhere(m.trunk.objects.filter(Exists(own(m)))),
    "not tied": lambda m: m.everywhere(m.trunk.objects.filter(~Exists(own(m)))),
    "the newest of each": lambda m: m.everywhere(
        m.trunk.objects.filter(n__lt=Subquery(own(m).order_by("-id").values("id")[:1]))
    ),
    "the number of each": lambda m: m.everywhere(
        m.trunk.objects.annotate(
            x=Subquery(own(m).values("parent").annotate(c=Count("id")).values("c"))
        ).filter(x=2)
    ),
    "by the key": lambda m: m.everywhere(
        m.trunk.objects.filter(Exists(m.twig.objects.filter(owner=OuterRef("owner"), n=2)))
    ),
    "in": lambda m: m.everywhere(m.trunk.objects.filter(pk__in=m.twig.objects.values("parent"))),
    "not in, without nulls": lambda m: m.everywhere(
        m.trunk.objects.exclude(pk__in=m.twig.objects.filter(parent__isnull=False).values("parent"))
    ),
    "not in, of a column that may be null": lambda m: m.everywhere(
        m.twig.objects.exclude(parent__in=m.trunk.objects.filter(n=5))
    ),
    "of this key": lambda m: m.trunk.objects.filter(owner=0, n__lt=largest(m, owner=0)),
    "inside of a subquery": lambda m: m.everywhere(
        m.trunk.objects.filter(
            Exists(own(m).filter(Exists(m.trunk.objects.filter(pk=OuterRef("parent"), n=5))))
        )
    ),
    "to the outermost": lambda m: m.everywhere(
        m.trunk.objects.filter(
            Exists(
                own(m).filter(Exists(m.twig.objects.filter(parent=OuterRef(OuterRef("pk")), n=4)))
            )
        )
    ),
    "over a relation": lambda m: m.everywhere(m.trunk.objects.exclude(twigs__n=1)),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_each_shard_can_answer_is_answered(name: str) -> None:
    make = RIGHT[name]
    expected = sorted(make(PLAIN).values_list("id", flat=True))
    assert sorted(make(SHARDED).values_list("id", flat=True)) == expected
    assert 0 < len(expected) < 4


def _ties() -> dict[str, Callable[[Models], Any]]:
    everything = SHARDED.everywhere
    return {
        "one tied side": lambda m: everything(Trunk.objects.filter(Exists(foreign(m)))),
        "negated": lambda m: everything(Trunk.objects.filter(~Exists(foreign(m)))),
        "in, one tied side": lambda m: everything(
            Trunk.objects.filter(pk__in=Twig.objects.values("ref"))
        ),
        "in, of one key": lambda m: Trunk.objects.filter(
            owner=0, pk__in=Twig.objects.values("ref")
        ),
        "a slice": lambda m: everything(
            Trunk.objects.filter(pk__in=Subquery(Trunk.objects.order_by("-id").values("pk")[:1]))
        ),
        "a slice, of one key": lambda m: Trunk.objects.filter(
            owner=0, pk__in=Subquery(Trunk.objects.order_by("-id").values("pk")[:1])
        ),
        "an aggregate": lambda m: everything(
            Trunk.objects.filter(
                pk__in=Trunk.objects.values("n").annotate(x=Max("pk")).values("x")
            )
        ),
        "groups": lambda m: everything(
            Trunk.objects.filter(
                pk__in=Twig.objects.values("parent").annotate(c=Count("id")).filter(c__gt=1)
                .values("parent")
            )
        ),
        "a window": lambda m: everything(
            Trunk.objects.filter(
                pk__in=Trunk.objects.annotate(x=Window(Rank(), order_by="n")).filter(x=1)
                .values("pk")
            )
        ),
        "a union": lambda m: everything(
            Trunk.objects.filter(
                pk__in=Trunk.objects.values("pk").union(Trunk.objects.values("pk"))
            )
        ),
        "nulls of other shards": lambda m: everything(
            Trunk.objects.exclude(pk__in=Twig.objects.values("parent"))
        ),
        "one of two": lambda m: everything(
            Trunk.objects.filter(Exists(Twig.objects.filter(Q(parent=OuterRef("pk")) | Q(n=1))))
        ),
        "within itself": lambda m: everything(
            Trunk.objects.filter(Exists(Twig.objects.filter(parent=F("parent"))))
        ),
        "the key of the outer row": lambda m: everything(
            Trunk.objects.filter(
                Exists(Twig.objects.filter(Exact(OuterRef("owner"), Value(0)), n=1))
            )
        ),
        "another key": lambda m: Trunk.objects.filter(owner=0, n__lt=largest(m, owner=1)),
        "one key for all": lambda m: everything(
            Trunk.objects.filter(owner=Subquery(Twig.objects.filter(owner=1).values("owner")[:1]))
        ),
    }  # fmt: skip


@pytest.mark.parametrize("name", _ties())
@pytest.mark.parametrize("act", ["list", "count", "update", "delete"])
def test_what_a_shard_cannot_answer_is_refused_before_anything_is_sent(name: str, act: str) -> None:
    before = rows_of(SHARDED)
    with Silence():
        with pytest.raises(CrossShardRelation, match=r"(Filter it|Evaluate it first|evaluate)"):
            queryset = _ties()[name](SHARDED)
            {
                "list": lambda: list(queryset),
                "count": queryset.count,
                "update": lambda: queryset.update(n=1),
                "delete": queryset.delete,
            }[act]()
    assert rows_of(SHARDED) == before


class Silence:
    """Fails if a statement is sent to a shard within the block."""

    def __enter__(self) -> None:
        self._captured = [CaptureQueriesContext(connections[alias]) for alias in aliases()]
        for captured in self._captured:
            captured.__enter__()

    def __exit__(self, *exc: Any) -> None:
        for captured in self._captured:
            captured.__exit__(None, None, None)
            assert not [query["sql"] for query in captured.captured_queries]


class Hiding(BaseExpression):
    """Holds a query where Django's own expressions hold none."""

    def __init__(self, hidden: Any) -> None:
        super().__init__(output_field=IntegerField())
        self.somewhere = {"deep": [hidden]}


PLACES: dict[str, Callable[[Any], Any]] = {
    "filter": lambda x: Trunk.objects.filter(owner=0, n=x),
    "filter, inside a list": lambda x: Trunk.objects.filter(owner=0, n__in=[1, x]),
    "exclude": lambda x: Trunk.objects.filter(owner=0).exclude(n=x),
    "a condition of a condition": lambda x: Trunk.objects.filter(
        Q(owner=0) & (Q(n=1) | ~Q(n__lt=x))
    ),
    "annotate": lambda x: Trunk.objects.filter(owner=0).annotate(x=x),
    "alias": lambda x: Trunk.objects.filter(owner=0).alias(x=x).filter(x=1),
    "values": lambda x: Trunk.objects.filter(owner=0).values(x=x),
    "case": lambda x: Trunk.objects.filter(owner=0).annotate(
        x=Case(When(n=x, then=Value(1)), default=Coalesce(x, 2))
    ),
    "wrapped": lambda x: Trunk.objects.filter(owner=0).annotate(
        x=ExpressionWrapper(x, output_field=IntegerField())
    ),
    "order": lambda x: Trunk.objects.filter(owner=0).order_by(x),
    "order, reversed": lambda x: Trunk.objects.filter(owner=0).order_by(x.desc()).reverse(),
    "window": lambda x: Trunk.objects.filter(owner=0).annotate(
        x=Window(Rank(), partition_by=[x], order_by=x)
    ),
    "groups": lambda x: Trunk.objects.filter(owner=0).values(x=x).annotate(c=Count("id")),
    "having": lambda x: Trunk.objects.filter(owner=0)
    .values("n").annotate(c=Count("id")).filter(c__gt=x),
    "an aggregate's filter": lambda x: Trunk.objects.filter(owner=0).annotate(
        c=Count("twigs", filter=Q(twigs__n=x))
    ),
    "a filtered relation": lambda x: Trunk.objects.filter(owner=0).annotate(
        r=FilteredRelation("twigs", condition=Q(twigs__n=x))
    ).filter(r__n=1),
    "a filtered relation that is followed": lambda x: Twig.objects.filter(owner=0).annotate(
        r=FilteredRelation("parent", condition=Q(parent__n=x))
    ).select_related("r"),
    "another subquery": lambda x: Trunk.objects.filter(
        owner=0, n=Subquery(Twig.objects.filter(owner=0, n=x).values("n")[:1])
    ),
    "a union": lambda x: Trunk.objects.filter(owner=0).union(
        Trunk.objects.filter(owner=0, n=x)
    ),
    "an order of a union": lambda x: Trunk.objects.filter(owner=0).union(
        Trunk.objects.filter(owner=0)
    ).order_by(x),
    "an attribute that nobody knows": lambda x: Trunk.objects.filter(owner=0).annotate(
        x=Hiding(x)
    ),
    "the first of an order": lambda x: Trunk.objects.filter(owner=0).order_by(x).first(),
    "latest": lambda x: Trunk.objects.filter(owner=0).latest(x),
    "aggregate": lambda x: Trunk.objects.filter(owner=0).aggregate(x=Sum(x)),
    "the filter of aggregate": lambda x: Trunk.objects.filter(owner=0).aggregate(
        x=Count("id", filter=Q(n=x))
    ),
    "update": lambda x: Trunk.objects.filter(owner=0).update(n=x),
    "create": lambda x: Trunk.objects.create(id=9, owner=0, n=x),
    "save": lambda x: Trunk(id=1, owner=0, n=x).save(),
    "save of a field": lambda x: Trunk(id=1, owner=0, n=x).save(update_fields=["n"]),
    "bulk_create": lambda x: Trunk.objects.bulk_create(
        [Trunk(id=8, owner=1), Trunk(id=9, owner=0, n=x)]
    ),
    "bulk_create on a shard": lambda x: Trunk.objects.using(aliases()[0]).bulk_create(
        [Trunk(id=9, owner=0, n=x)]
    ),
    "bulk_update": lambda x: Trunk.objects.bulk_update(
        [Trunk(id=2, owner=1, n=1), Trunk(id=1, owner=0, n=x)], ["n"]
    ),
    "get_or_create": lambda x: Trunk.objects.get_or_create(id=9, owner=0, n=x),
    "the defaults of get_or_create": lambda x: Trunk.objects.get_or_create(
        id=9, owner=0, defaults={"n": x}
    ),
    "update_or_create": lambda x: Trunk.objects.update_or_create(
        id=1, owner=0, defaults={"n": x}
    ),
    "a filter before it": lambda x: Trunk.objects.filter(n=x).get_or_create(id=9, owner=0),
    "a related manager": lambda x: Trunk(id=1, owner=0).twigs.filter(n=x),
    "get_or_create of a related manager": lambda x: _saved().twigs.get_or_create(
        id=99, owner=0, n=x
    ),
    "validate_constraints": lambda x: Trunk(id=9, owner=0, n=x).validate_constraints(),
    "validate_unique": lambda x: Trunk(id=9, owner=0, n=x).validate_unique(),
}  # fmt: skip


def _saved() -> Trunk:
    return Trunk.objects.get(id=1, owner=0)


@pytest.mark.parametrize("place", PLACES)
def test_a_subquery_is_seen_wherever_it_stands(place: str) -> None:
    before = rows_of(SHARDED)
    with pytest.raises(CrossShardRelation, match=r"does not say which shard"):
        found = PLACES[place](largest(SHARDED))
        if hasattr(found, "query"):
            list(found)
    assert rows_of(SHARDED) == before


@pytest.mark.parametrize("place", [p for p in PLACES if "nobody knows" not in p])
def test_a_subquery_about_this_shard_is_no_hindrance_there(place: str) -> None:
    try:
        found = PLACES[place](largest(SHARDED, owner=0))
        if hasattr(found, "query"):
            list(found)
    except CrossShardRelation as exc:  # pragma: no cover
        raise AssertionError(place) from exc
    except Exception:
        pass  # Django and the database have reasons of their own


def test_a_named_shard_is_asked_as_it_is() -> None:
    rows = Trunk.objects.using(aliases()[0])
    assert list(rows.filter(pk__in=Trunk.objects.order_by("-id").values("pk")).order_by("id"))
    assert rows.aggregate(x=Sum(largest(SHARDED)))["x"] is not None


def test_a_constraint_cannot_look_at_other_rows() -> None:
    condition = Q(n__in=Twig.objects.values("n"))
    with pytest.raises(CrossShardRelation, match="constraint 'x' has a subquery"):
        check_constraint(UniqueConstraint(fields=["n"], condition=condition, name="x"))
    check_constraint(UniqueConstraint(fields=["n"], condition=Q(n__gt=1), name="x"))


# -- Custom SQL


class Same(Lookup):  # type: ignore[type-arg]  # generic in the stubs only
    lookup_name = "same"

    def as_sql(self, compiler: Any, connection: Any) -> Any:
        left, left_params = self.process_lhs(compiler, connection)
        right, right_params = self.process_rhs(compiler, connection)
        return f"{left} = {right}", [*left_params, *right_params]


@reads_own_row
class Declared(Same):
    lookup_name = "declared_same"


@reads_own_row
class Nearly(Exact):  # type: ignore[type-arg]  # generic in the stubs only
    def as_sql(self, compiler: Any, connection: Any) -> Any:
        left, left_params = self.process_lhs(compiler, connection)
        right, right_params = self.process_rhs(compiler, connection)
        return f"ABS({left} - {right}) <= 1", [*left_params, *right_params]


class Rounded(Exact):  # type: ignore[type-arg]  # generic in the stubs only
    """Prepares its value in its own way, and compares as Django does."""

    def get_prep_lookup(self) -> Any:
        return int(self.rhs)


class Bracketed(Func):
    template = "(%(expressions)s)"


class Reading(Func):
    template = "(SELECT MAX(id) FROM twins_twig)"


@pytest.mark.parametrize(
    "make",
    [
        lambda: Trunk.objects.filter(owner=0).annotate(
            x=RawSQL("(select max(id) from twins_twig)", [])
        ),
        lambda: Trunk.objects.filter(owner=0).annotate(x=Reading("n", output_field=CharField())),
        lambda: Trunk.objects.filter(owner=0).annotate(
            x=Func("n", template="(SELECT %(expressions)s)", output_field=IntegerField())
        ),
        lambda: Trunk.objects.filter(owner=0).extra(select={"x": "(SELECT 1)"}),
        lambda: Trunk.objects.filter(owner=0).extra(where=["n IN (Select n FROM twins_twig)"]),
        lambda: Trunk.objects.filter(owner=0).extra(tables=["twins_twig"]),
        lambda: Trunk.objects.filter(Same(F("n"), 1), owner=0),
        lambda: Trunk.objects.filter(Same(F("n"), F("n")), owner=0),
    ],
)
def test_sql_of_which_nobody_can_tell_what_it_reads_is_refused(make: Any) -> None:
    with pytest.raises(UnknownExpression, match=r"(using\(\)|evaluate it first)"):
        list(make())


@pytest.mark.parametrize(
    "make",
    [
        lambda: Trunk.objects.filter(owner=0).annotate(x=RawSQL("n + %s", [1])),
        lambda: Trunk.objects.filter(owner=0).annotate(
            x=Bracketed("n", output_field=IntegerField())
        ),
        lambda: Trunk.objects.filter(owner=0).extra(where=["n > %s"], params=[1]),
        lambda: Trunk.objects.filter(Declared(F("n"), 5), owner=0),
        lambda: Trunk.objects.using(aliases()[0]).filter(Same(F("n"), 5), owner=0),
    ],
)
def test_sql_that_reads_its_own_row_is_run(make: Any) -> None:
    assert [row.id for row in make()] == [1]


def test_equality_of_a_project_tells_the_shard_if_it_is_equality() -> None:
    assert Trunk.objects.get(Rounded(F("owner"), "0")).id == 1
    with pytest.raises(ShardKeyRequired):
        list(Trunk.objects.filter(Nearly(F("owner"), 1)))
    rows = Trunk.objects.scatter().filter(Nearly(F("owner"), 1))  # type: ignore[attr-defined]
    assert sorted(row.id for row in rows) == [1, 2, 3]
    assert [row.id for row in Trunk.objects.filter(Nearly(F("n"), 4), owner=0)] == [1]


class Drawn(Func):
    def as_sql(self, compiler: Any, connection: Any, **extra: Any) -> Any:
        return "RANDOM()", []


@isolate_apps("tests.photos")
def test_a_default_of_the_database_reads_no_rows() -> None:
    class Lot(ShardedModel):
        user_id = models.BigIntegerField()
        number = models.IntegerField(db_default=Drawn(output_field=IntegerField()))

        class Meta:
            app_label = "photos_app"

        class ShardMeta:
            group = "photos"
            shard_key = "user_id"

    here = colocation_on(Lot._shard_options(), "photos_00003")
    check_insert(here, [Lot(user_id=ONE), Lot(user_id=ONE, number=1)])
    with pytest.raises(UnknownExpression):
        check_insert(here, [Lot(user_id=ONE), Lot(user_id=ONE, number=Drawn())])
    with pytest.raises(CrossShardRelation):
        check_insert(here, [Lot(user_id=ONE, number=DatabaseDefault(largest(SHARDED)))])


# -- Attributes of queries


def test_every_attribute_of_a_query_is_known() -> None:
    """A later Django with another attribute fails here: check whether it can hold an expression."""
    kinds = (Query, UpdateQuery, InsertQuery, DeleteQuery)
    queries = [*(kind(Trunk) for kind in kinds), AggregateQuery(Trunk, Query(Trunk))]
    found: set[str] = set()
    for query in queries:
        found |= vars(query).keys()
        for cls in type(query).__mro__:
            if cls.__module__.startswith("django.db.models.sql"):
                found |= {
                    name
                    for name, value in vars(cls).items()
                    if not callable(value)
                    and not isinstance(value, property | classmethod | staticmethod)
                    and not name.startswith("__")
                    and name not in ("base_table_class", "join_class")
                }
    known = HOLDS_EXPRESSIONS | HOLDS_NAMES | HOLDS_NONE
    used_by_instances_only = {"_constructor_args", "_db", "_lookup_joins", "raw"}
    assert found == known - used_by_instances_only - NOT_YET_IN_QUERIES
    assert not HOLDS_EXPRESSIONS & HOLDS_NAMES
    assert not (HOLDS_EXPRESSIONS | HOLDS_NAMES) & HOLDS_NONE


# -- Rows of the global database


ACROSS: dict[str, Callable[[Any], Any]] = {
    "by name": lambda rows: list(rows.order_by("author__username")),
    "by name, downward": lambda rows: list(rows.order_by("-author__username")),
    "by an expression": lambda rows: list(rows.order_by(F("author__username").desc())),
    "by a function": lambda rows: list(rows.order_by(Coalesce("author__username", Value("")))),
    "by the related order": lambda rows: list(rows.order_by("author")),
    "the latest": lambda rows: rows.latest("author__username"),
    "the earliest": lambda rows: rows.earliest("author__username"),
    "the first": lambda rows: rows.order_by("author__username").first(),
    "the first values": lambda rows: list(rows.order_by("author__username").values("pk")[:2]),
    "a number of a slice": lambda rows: rows.order_by("author__username")[:3].count(),
    "an aggregate": lambda rows: rows.aggregate(x=Count("author__username")),
    "a filter of an aggregate": lambda rows: rows.aggregate(
        x=Count("pk", filter=Q(author__username="x"))
    ),
    "distinct by it": lambda rows: list(rows.distinct("author__username")),
    "a number of those that are distinct by it": lambda rows: (
        rows.distinct("author__username").count()
    ),
    "a filter": lambda rows: list(rows.filter(author__username="x")),
    "an annotation": lambda rows: list(rows.annotate(x=F("author__username"))),
    "select_related": lambda rows: list(rows.select_related("author")),
    "a filtered relation that is followed": lambda rows: list(
        rows.annotate(x=FilteredRelation("author")).select_related("x")
    ),
    "a subquery": lambda rows: list(
        rows.filter(author_id__in=Person.objects.filter(username="x").values("pk"))
    ),
    "iterator": lambda rows: list(rows.order_by("author__username").iterator()),
    "explain": lambda rows: rows.order_by("author__username").explain(),
}  # fmt: skip


@pytest.mark.parametrize("scope", ["key", "all", "partial"])
@pytest.mark.parametrize("name", ACROSS)
def test_a_join_to_the_global_database_is_refused_before_anything_is_sent(
    name: str, scope: str, placed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Person._meta, "ordering", ["username"])
    rows = {
        "key": lambda: Comment.objects.filter(user_id=ONE),
        "all": lambda: Comment.objects.scatter(),  # type: ignore[attr-defined]
        "partial": lambda: Comment.objects.scatter(partial=True),  # type: ignore[attr-defined]
    }[scope]()
    with CaptureQueriesContext(connections["photos_00003"]) as sent:
        with pytest.raises(CrossShardRelation, match=r"Person, which is in the global database"):
            ACROSS[name](rows)
    assert not sent.captured_queries


def test_what_needs_no_join_is_run(placed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Person._meta, "ordering", ["username"])
    rows = Comment.objects.filter(user_id=ONE)
    # The number of rows does not depend on their order.
    assert rows.order_by("author__username").count() == 0
    assert not rows.order_by("author").exists()
    assert not rows.order_by("author_id")
    assert rows.order_by("author__username").delete()[0] == 0
    assert rows.aggregate(x=Count("author_id")) == {"x": 0}
    row = Comment.objects.create(user_id=ONE, photo=Photo.objects.create(user_id=ONE))
    by_name = Comment.objects.order_by("author__username")
    assert by_name.get(user_id=ONE, pk=row.pk) == row
    assert by_name.get_or_create(user_id=ONE, pk=row.pk) == (row, False)


@isolate_apps("tests.photos")
@pytest.mark.filterwarnings("ignore:Calling select_related")
def test_what_is_followed_without_a_name_stays_in_the_group() -> None:
    class Sticker(ShardedModel):
        user_id = models.BigIntegerField()
        album = models.ForeignKey(Album, models.CASCADE, related_name="+")

        class Meta:
            app_label = "photos_app"

        class ShardMeta:
            group = "photos"
            shard_key = "user_id"

    with CaptureQueriesContext(connections["photos_00003"]) as sent:
        with pytest.raises(CrossShardRelation, match=r"follows \(select_related\) Person"):
            list(Sticker.objects.filter(user_id=ONE).select_related())
    assert not sent.captured_queries


GLOBAL: dict[str, Callable[[], Any]] = {
    "filter": lambda: list(Person.objects.filter(albums__title="x")),
    "order": lambda: list(Person.objects.order_by("albums__title")),
    "union": lambda: list(
        Person.objects.values("pk").union(Album.objects.filter(owner_id=ONE).values("pk"))
    ),
    "order by a subquery": lambda: list(Person.objects.order_by(Subquery(_titles()))),
    "aggregate": lambda: Person.objects.aggregate(x=Count("albums")),
    "aggregate with a subquery": lambda: Person.objects.aggregate(x=Max(Subquery(_titles()))),
    "update": lambda: Person.objects.update(username=Subquery(_titles())),
    "create": lambda: Person.objects.create(username=Subquery(_titles())),
    "bulk_create": lambda: Person.objects.bulk_create([Person(username=Subquery(_titles()))]),
    "save": lambda: Person(pk=1, username=Subquery(_titles())).save(),
    "bulk_update": lambda: Person.objects.bulk_update(
        [Person(pk=1, username=Subquery(_titles()))], ["username"]
    ),
}


def _titles() -> Any:
    return Album.objects.filter(owner_id=ONE).values("title")[:1]


@pytest.mark.parametrize("name", GLOBAL)
def test_the_global_database_cannot_reach_a_shard(name: str) -> None:
    with CaptureQueriesContext(connections["default"]) as sent:
        with pytest.raises(CrossShardRelation, match="Album, which is in group 'photos'"):
            GLOBAL[name]()
    assert not [query for query in sent.captured_queries if "photos" in query["sql"]]


@pytest.mark.parametrize(
    "make",
    [
        lambda rows: rows.filter(Same(F("username"), "p")),
        lambda rows: rows.annotate(x=RawSQL("(SELECT MAX(id) FROM photos_app_person)", [])),
        lambda rows: rows.extra(where=["id IN (SELECT id FROM photos_app_person)"]),
        lambda rows: rows.extra(tables=["django_content_type"]).distinct(),
    ],
)
def test_sql_of_the_global_database_is_its_own_affair(make: Any) -> None:
    ContentType.objects.get_for_model(Person)
    person = Person.objects.create(username="p")
    assert list(make(Person.objects.all())) == [person]
    with pytest.raises(CrossShardRelation):
        list(make(Person.objects.filter(albums__title="x")))
    with pytest.raises(CrossShardRelation):
        list(make(Person.objects.filter(username=Subquery(_titles()))))


PLAIN_MODEL: dict[str, Callable[[], Any]] = {
    "in": lambda: list(User.objects.filter(pk__in=Album.objects.filter(owner_id=ONE).values("pk"))),
    "exists": lambda: list(User.objects.filter(Exists(Album.objects.filter(owner_id=ONE)))),
    "annotation": lambda: list(User.objects.annotate(x=Subquery(_titles()))),
    "order": lambda: list(User.objects.order_by(Subquery(_titles()))),
    "aggregate": lambda: User.objects.aggregate(x=Max(Subquery(_titles()))),
    "update": lambda: User.objects.update(username=Subquery(_titles())),
    "create": lambda: User.objects.create(username=Subquery(_titles())),
}


@pytest.mark.parametrize("name", PLAIN_MODEL)
def test_a_plain_model_has_no_subquery_on_shards(name: str) -> None:
    with pytest.raises(CrossShardRelation, match="Evaluate it first"):
        PLAIN_MODEL[name]()
