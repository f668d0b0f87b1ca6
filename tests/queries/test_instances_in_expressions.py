"""Expressions that compare with an instance: as one database, or refused.

The ids of these albums and tags are counted by each shard, so rows of two shards have the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.db import connections, transaction
from django.db.models import (
    BooleanField,
    Case,
    Count,
    Exists,
    ExpressionWrapper,
    F,
    FilteredRelation,
    OuterRef,
    Q,
    Subquery,
    Sum,
    Value,
    When,
    Window,
)
from django.test.utils import CaptureQueriesContext
from django.utils.functional import SimpleLazyObject

from sharded_orm.exceptions import CrossShardRelation
from tests.cached.models import CachedAlbum, CachedPhoto, CachedTag
from tests.integration.subqueries.conftest import OWNERS, alias_of
from tests.photos.models import Album, Photo, Tag
from tests.queries.conftest import DATABASES, NEAR, ONE, SHARD, TWO
from tests.twins.models import Tree

pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.long_on("mysql"),
    pytest.mark.django_db(databases=DATABASES),
]

Rows = Any
Condition = Callable[[], Q]


@pytest.fixture
def albums(placed: None) -> dict[int, CachedAlbum]:
    """Albums of two shards that have the same id, with three photos and two; ONE and NEAR share a shard."""
    albums = {key: CachedAlbum.objects.create(user_id=key, title=f"of {key}") for key in (ONE, TWO)}
    albums[TWO] = _with_id(albums[TWO], albums[ONE].pk)
    for key, number in ((ONE, 3), (TWO, 2)):
        for _ in range(number):
            CachedPhoto.objects.create(user_id=key, album=albums[key], title=f"of {key}")
    CachedPhoto.objects.create(user_id=NEAR, title="near")
    return albums


def _with_id(row: Any, pk: int) -> Any:
    # On a server, the counters of two schemas are at different numbers after other tests.
    if row.pk == pk:
        return row
    rows = type(row).objects.filter(user_id=row.user_id)
    with connections[row._state.db].cursor() as cursor:
        table, column = row._meta.db_table, row._meta.pk.column
        cursor.execute(f"UPDATE {table} SET {column} = %s WHERE {column} = %s", [pk, row.pk])
    return rows.get(pk=pk)


@pytest.fixture
def tags(placed: None) -> dict[int, CachedTag]:
    tags = {key: CachedTag.objects.create(user_id=key, name=f"of {key}") for key in (ONE, TWO)}
    tags[TWO] = _with_id(tags[TWO], tags[ONE].pk)
    for key, tag in tags.items():
        CachedPhoto.objects.create(user_id=key, title=f"of {key}").tags.add(tag)
    return tags


def _titles(rows: Rows, *names: str) -> list[Any]:
    return sorted(rows.values_list("title", *names), key=repr)


#: Where a condition can be in an expression. Each is called with rows and a condition.
PLACES: dict[str, Callable[[Rows, Q], Any]] = {
    "filter of an aggregate": lambda rows, q: rows.aggregate(n=Count("pk", filter=q)),
    "aggregate of a case": lambda rows, q: rows.aggregate(n=Sum(Case(When(q, then=1), default=0))),
    "annotated case": lambda rows, q: _titles(
        rows.annotate(x=Case(When(q, then=Value("in")), default=Value("out"))), "x"
    ),
    "nested case": lambda rows, q: _titles(
        rows.annotate(x=Case(When(Q(stars=0) & (q | Q(pk=-1)), then=1), default=0) + 1), "x"
    ),
    "negated case": lambda rows, q: _titles(
        rows.annotate(x=Case(When(~q, then=1), default=0)), "x"
    ),
    "wrapped": lambda rows, q: _titles(
        rows.annotate(x=ExpressionWrapper(q, output_field=BooleanField())), "x"
    ),
    "annotated": lambda rows, q: _titles(rows.annotate(x=q), "x"),
    "alias": lambda rows, q: rows.alias(x=q).filter(x=True).count(),
    "case in filter()": lambda rows, q: rows.filter(
        Case(When(q, then=True), default=False, output_field=BooleanField())
    ).count(),
    "case in exclude()": lambda rows, q: rows.exclude(
        Case(When(q, then=True), default=False, output_field=BooleanField())
    ).count(),
    "wrapped in filter()": lambda rows, q: rows.filter(
        ExpressionWrapper(q, output_field=BooleanField())
    ).count(),
    "value of a condition": lambda rows, q: rows.filter(
        stars=Case(When(q, then=0), default=1)
    ).count(),
    "order": lambda rows, q: list(
        rows.order_by(Case(When(q, then=0), default=1), "title", "user_id").values_list(
            "title", flat=True
        )
    ),
    "order by the condition": lambda rows, q: list(
        rows.order_by(ExpressionWrapper(q, output_field=BooleanField()), "title").values_list(
            "title", flat=True
        )
    ),
    "groups": lambda rows, q: list(
        rows.order_by("user_id").values("user_id").annotate(n=Count("pk", filter=q))
    ),
    "grouped by": lambda rows, q: list(
        rows.annotate(x=Case(When(q, then=1), default=0))
        .order_by("x")
        .values("x")
        .annotate(n=Count("pk"))
    ),
    "delete": lambda rows, q: rows.filter(
        Case(When(q, then=True), default=False, output_field=BooleanField())
    ).delete()[1],
    "update": lambda rows, q: (
        rows.update(stars=Case(When(q, then=9), default=0)),
        sorted(rows.values_list("title", "stars")),
    ),
    "bulk_update": lambda rows, q: (
        CachedPhoto.objects.bulk_update(
            [_changed(row, stars=Case(When(q, then=9), default=0)) for row in rows], ["stars"]
        ),
        sorted(rows.values_list("title", "stars")),
    ),
    "save": lambda rows, q: (
        [_changed(row, stars=Case(When(q, then=9), default=0)).save() for row in rows],
        sorted(rows.values_list("title", "stars")),
    ),
}


def _changed(row: Any, **values: Any) -> Any:
    for name, value in values.items():
        setattr(row, name, value)
    return row


#: How a condition names the instance.
CONDITIONS: dict[str, Callable[[Any], Q]] = {
    "instance": lambda album: Q(album=album),
    "exact": lambda album: Q(album__exact=album),
    "list": lambda album: Q(album__in=[album]),
    "iterator": lambda album: Q(album__in=iter([album])),
    "set": lambda album: Q(album__in={album}),
    "dict": lambda album: Q(album__in={album: 1}),
    "list with ids": lambda album: Q(album__in=[album, -1]),
    "lazy object": lambda album: Q(album=SimpleLazyObject(lambda: album)),
    "list of lazy objects": lambda album: Q(album__in=[SimpleLazyObject(lambda: album)]),
    "beside its id": lambda album: Q(album_id=album.pk, album=album),
}

BASES: dict[str, Callable[[], Rows]] = {
    "scatter": lambda: CachedPhoto.objects.scatter(),
    "keys": lambda: CachedPhoto.objects.filter(user_id__in=[ONE, TWO]),
    "other key": lambda: CachedPhoto.objects.filter(user_id=TWO),
    "using": lambda: CachedPhoto.objects.using(SHARD[TWO]),
}


def _stars() -> list[Any]:
    return sorted(CachedPhoto.objects.scatter().values_list("user_id", "title", "stars"))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("base", BASES)
def test_other_shards_are_refused(
    albums: dict[int, CachedAlbum], base: str, place: str, request: Any
) -> None:
    before = _stars()
    # An error inside save() breaks the innermost atomic block.
    with pytest.raises(CrossShardRelation, match="Remedy:"), transaction.atomic("photos"):
        PLACES[place](BASES[base](), Q(album=albums[ONE]))
    assert _stars() == before


@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize("base", BASES)
def test_all_forms_of_instances_are_refused(
    albums: dict[int, CachedAlbum], base: str, condition: str
) -> None:
    for place in ("filter of an aggregate", "annotated case", "update"):
        with pytest.raises(CrossShardRelation, match="Remedy:"), transaction.atomic("photos"):
            PLACES[place](BASES[base](), CONDITIONS[condition](albums[ONE]))
    assert not CachedPhoto.objects.scatter().exclude(stars=0).exists()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("key", [ONE, NEAR])
def test_the_shard_of_the_instance_answers_as_django(
    albums: dict[int, CachedAlbum], place: str, key: int
) -> None:
    rows = CachedPhoto.objects.filter(user_id=key)
    ids: Any = Q(album_id=albums[ONE].pk)
    expected = PLACES["annotated case"](rows, ids)
    assert PLACES["annotated case"](rows, Q(album=albums[ONE])) == expected
    for form in CONDITIONS:
        condition = CONDITIONS[form](albums[ONE])
        if place not in ("delete", "save", "bulk_update") or form == "instance":
            if form == "iterator" and place in ("save", "bulk_update"):
                continue
            result = PLACES[place](rows, condition)
            if place != "delete":
                assert result == PLACES[place](rows, CONDITIONS[form](albums[ONE])), form
                assert result == PLACES[place](rows, ids), form
            elif key == ONE:
                assert not rows.filter(album=albums[ONE]).exists()


@pytest.mark.parametrize("base", BASES)
def test_the_remedy(albums: dict[int, CachedAlbum], base: str) -> None:
    album = albums[ONE]
    for place, call in PLACES.items():
        # Groups by ids that each shard counts are refused anyhow.
        if place not in ("delete", "grouped by"):
            call(BASES[base](), Q(album=album.pk, user_id=album.user_id))
    rows = CachedPhoto.objects.scatter()
    condition = Q(album=album.pk, user_id=album.user_id)
    assert rows.aggregate(n=Count("pk", filter=condition)) == {"n": 3}
    rows.update(stars=Case(When(condition, then=9), default=0))
    assert sorted(row[2] for row in _stars()) == [0, 0, 0, 9, 9, 9]


def test_filter_by_lists_of_every_kind(albums: dict[int, CachedAlbum]) -> None:
    for name, condition in CONDITIONS.items():
        for key, number in ((ONE, 3), (TWO, 2)):
            rows = CachedPhoto.objects.scatter()
            assert rows.filter(condition(albums[key])).count() == number, name
            assert rows.filter(condition(albums[key])).count() == number, name
            assert rows.exclude(condition(albums[key])).count() == 6 - number, name
    both = Q(album__in=[albums[ONE], albums[TWO].pk])
    assert CachedPhoto.objects.scatter().filter(both).count() == 5
    mixed = Q(album__in=(album for album in (albums[ONE], -1)))
    assert CachedPhoto.objects.filter(user_id__in=[ONE, TWO]).filter(mixed).count() == 3


def test_none_in_an_excluded_list(albums: dict[int, CachedAlbum]) -> None:
    """Django before 6.1 ignores it; since then, rows with NULL are excluded, too."""
    CachedPhoto.objects.create(user_id=TWO, title="loose")
    pk = albums[ONE].pk
    expected = sum(
        CachedPhoto.objects.filter(user_id=key).exclude(album_id__in=[other, None]).count()
        for key, other in ((ONE, pk), (NEAR, pk), (TWO, -1))
    )
    for listed in ([albums[ONE], None], [albums[ONE], -1, None]):
        assert CachedPhoto.objects.scatter().exclude(album__in=listed).count() == expected
        found = CachedPhoto.objects.filter(user_id__in=[ONE, TWO, NEAR]).exclude(album__in=listed)
        assert found.count() == expected
        assert CachedPhoto.objects.scatter().filter(album__in=listed).count() == 3
    routed = CachedPhoto.objects.filter(album__in=[albums[ONE], None])
    assert routed.explain_routing().aliases == (SHARD[ONE],)


@pytest.mark.parametrize("base", BASES)
def test_joined_tables(tags: dict[int, CachedTag], base: str) -> None:
    for condition in (Q(tags=tags[ONE]), Q(tags__in=[tags[ONE]])):
        for call in (
            lambda rows, q: list(rows.annotate(n=Count("tags", filter=q))),
            lambda rows, q: list(rows.annotate(x=Case(When(q, then=1), default=0))),
            lambda rows, q: list(
                rows.annotate(t=FilteredRelation("tags", condition=q)).values("t__name")
            ),
            lambda rows, q: list(
                rows.annotate(t=FilteredRelation("tags", condition=q)).filter(t__name="a")
            ),
        ):
            with pytest.raises(CrossShardRelation, match="Remedy:"):
                call(BASES[base](), condition)


@pytest.mark.parametrize("base", BASES)
def test_filtered_relations(albums: dict[int, CachedAlbum], base: str) -> None:
    for condition in (Q(album=albums[ONE]), Q(album__in=[albums[ONE]])):
        for call in (
            lambda rows: list(rows.values("al__title")),
            lambda rows: list(rows.order_by("al__title")),
            lambda rows: list(rows.select_related("al")),
            lambda rows: rows.filter(al__title="x").count(),
        ):
            related = FilteredRelation("album", condition=condition)
            with pytest.raises(CrossShardRelation, match="Remedy:"):
                call(BASES[base]().annotate(al=related))
    photo = CachedPhoto.objects.filter(user_id=ONE, album=albums[ONE]).first()
    own = CachedAlbum.objects.filter(user_id=ONE)
    results = [
        own.annotate(p=FilteredRelation("photos", condition=condition))
        .filter(p__title__startswith="of")
        .count()
        for condition in (Q(photos=photo), Q(photos=photo.pk), Q(photos__album=albums[ONE]))
    ]
    assert results[0] == results[1]
    assert results[2] == 3


@pytest.mark.parametrize("base", BASES)
def test_subqueries_with_instances(albums: dict[int, CachedAlbum], base: str) -> None:
    inner = CachedPhoto.objects.filter(pk=OuterRef("pk"), album=albums[ONE])
    annotated = CachedPhoto.objects.filter(pk=OuterRef("pk")).annotate(
        x=Case(When(album=albums[ONE], then=1), default=0)
    )
    calls: list[Callable[[Rows], Any]] = [
        lambda rows: rows.annotate(x=Exists(inner)).values_list("user_id", "x"),
        lambda rows: rows.filter(Exists(inner)),
        lambda rows: rows.filter(~Exists(inner)),
        lambda rows: rows.filter(pk__in=CachedPhoto.objects.filter(album=albums[ONE])),
        lambda rows: rows.filter(Case(When(Exists(inner), then=True), default=False)),
        lambda rows: rows.annotate(x=Subquery(annotated.values("x")[:1])),
    ]
    ids = CachedPhoto.objects.filter(
        pk=OuterRef("pk"), album=albums[ONE].pk, user_id=albums[ONE].user_id
    )
    expected = [
        sorted(BASES[base]().filter(Exists(ids)).values_list("user_id", "pk")),
        sorted(BASES[base]().filter(~Exists(ids)).values_list("user_id", "pk")),
    ]
    for number, call in enumerate(calls):
        try:
            values = ("user_id", "pk", "x") if number in (0, 5) else ("user_id", "pk")
            rows = sorted(call(BASES[base]()).values_list(*values))
        except CrossShardRelation:
            continue
        assert base == "using", number
        assert rows == expected[number == 2] or number in (0, 5), number


def test_excluded_relations_of_many_rows(tags: dict[int, CachedTag]) -> None:
    """Django makes a subquery of such a condition. The condition beside it limits it to a shard."""
    for base in ("scatter", "keys"):
        rows = BASES[base]()
        assert [row.user_id for row in rows.exclude(tags=tags[ONE])] == [TWO]
        assert [row.user_id for row in rows.exclude(tags__in=[tags[ONE]])] == [TWO]
        assert [row.user_id for row in rows.filter(~Q(tags=tags[TWO]) | Q(pk=-1))] == [ONE]
        assert not rows.exclude(tags__in=list(tags.values())).exists()


def test_ids_that_are_unique_over_all_shards_are_compared(rows: list[Photo]) -> None:
    album = Album.objects.create(owner_id=ONE, title="own")
    Photo.objects.filter(pk=rows[0].pk, user_id=ONE).update(album=album)
    photos = Photo.objects.scatter()
    assert photos.aggregate(n=Count("pk", filter=Q(album=album))) == {"n": 1}
    case: Any = Case(When(album__in=[album], then=1), default=0)
    assert photos.aggregate(n=Sum(case)) == {"n": 1}
    photos.update(stars=case)
    assert Photo.objects.scatter().filter(stars=1).get() == rows[0]
    tag = Tag.objects.create(user_id=ONE, name="tag")
    rows[0].tags.add(tag)
    for tied in (
        Photo.objects.filter(pk=OuterRef("pk"), album=album),
        album.photos.filter(pk=OuterRef("pk")),
    ):
        assert list(photos.filter(Exists(tied))) == [rows[0]]
    assert list(photos.filter(pk__in=album.photos.all())) == [rows[0]]
    tags = Tag.objects.scatter()
    assert list(tags.filter(pk__in=rows[0].tags.all())) == [tag]
    assert list(tags.filter(photos__in=[rows[0], -1])) == [tag]
    assert tags.aggregate(n=Count("pk", filter=Q(photos=rows[0]))) == {"n": 1}


def test_nothing_is_sent(albums: dict[int, CachedAlbum]) -> None:
    for place, call in PLACES.items():
        if place in ("save", "bulk_update"):
            continue  # They read the rows first.
        with (
            CaptureQueriesContext(connections[SHARD[ONE]]) as one,
            CaptureQueriesContext(connections[SHARD[TWO]]) as two,
            pytest.raises(CrossShardRelation),
        ):
            call(BASES["keys"](), Q(album=albums[ONE]))
        assert not one.captured_queries + two.captured_queries, place


def test_a_window(albums: dict[int, CachedAlbum]) -> None:
    window: Any = Window(Sum(Case(When(album=albums[ONE], then=1), default=0)))
    with pytest.raises(CrossShardRelation, match="Remedy:"):
        list(CachedPhoto.objects.filter(user_id=TWO).annotate(n=window))
    own = CachedPhoto.objects.filter(user_id=ONE).annotate(n=window)
    assert [row.n for row in own] == [3, 3, 3]
    assert list(own.filter(n=3).values_list(F("n") + 1, flat=True)) == [4, 4, 4]


def test_the_table_of_a_parent(db_all: None) -> None:
    """Django updates it by a query of its own, which resolves the values once more."""
    owners = sorted(OWNERS, key=alias_of)
    trees = [Tree.objects.create(id=1, owner=owner, n=5) for owner in (owners[0], owners[-1])]
    aliases = [alias_of(tree.owner) for tree in trees]
    assert aliases[0] != aliases[1]
    value = Case(When(tree=trees[0], then=9), default=0)
    with pytest.raises(CrossShardRelation, match="Remedy:"), transaction.atomic("events"):
        Tree.objects.using(aliases[1]).update(n=value)
    assert set(Tree.objects.scatter().values_list("n", flat=True)) == {5}
