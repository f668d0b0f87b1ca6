"""What other packages do with models, querysets and queries, written with Django alone.

Each case does what a package does that many sites use. The result is that of one database, or an
error that names the remedy.
"""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.contenttypes.fields import GenericRelation
from django.contrib.contenttypes.models import ContentType
from django.db import models
from django.db.models.query import ModelIterable
from django.db.models.sql import Query
from django.db.models.sql.constants import INNER
from django.forms import modelform_factory
from django.test.utils import isolate_apps

from sharded_orm import bound
from sharded_orm.exceptions import (
    CrossKeyRelation,
    DeletionRefused,
    ScatterNotSupported,
    ShardKeyRequired,
    UnknownExpression,
)
from sharded_orm.models import ShardedQuerySet, TicketField
from tests.photos.models import Album, OnPhotos, Photo
from tests.queries.conftest import DATABASES, ONE, TWO
from tests.relatives.sharded.models import Memo

pytestmark = [pytest.mark.every_backend, pytest.mark.django_db(databases=DATABASES)]


# -- Models with a delete() of their own, as in packages for soft deletion


class SoftRow(models.Model):
    """Marks a row as deleted. Its delete() takes ``soft``, and returns None."""

    class Meta:
        abstract = True
        app_label = "photos_app"

    def delete(self, using: Any = None, *, soft: bool = True, **kwargs: Any) -> Any:
        if not soft:
            return super().delete(using=using, **kwargs)
        self.title = "deleted"  # type: ignore[attr-defined]  # a field of the model
        self.save(using=using, **kwargs)
        return None


@pytest.fixture
def soft_photo(rows: list[Photo]) -> Any:
    with isolate_apps("tests.photos"):

        class SoftPhoto(Photo, SoftRow):
            class Meta:
                app_label = "photos_app"
                proxy = True

    return SoftPhoto.objects.filter(user_id=ONE).first()


def test_the_delete_of_a_base_class_behind_ours_is_called(soft_photo: Any) -> None:
    assert soft_photo.delete() is None
    assert Photo.objects.get(user_id=ONE, pk=soft_photo.pk).title == "deleted"


def test_the_delete_of_a_base_class_gets_its_own_arguments(soft_photo: Any) -> None:
    assert soft_photo.delete(soft=False)[0] == 1
    assert not Photo.objects.filter(user_id=ONE, pk=soft_photo.pk).exists()


def test_an_argument_that_no_base_class_knows_is_an_error(rows: list[Photo]) -> None:
    with pytest.raises(TypeError, match="soft"):
        rows[0].delete(soft=False)
    assert Photo.objects.filter(user_id=ONE, pk=rows[0].pk).exists()


# -- Models with a save_base() and a validation of their own, as in packages for translations


class NotedRow(models.Model):
    """Takes the arguments that Django gives by name, and no others, by name only."""

    class Meta:
        abstract = True
        app_label = "photos_app"

    def save_base(self, raw: bool = False, using: Any = None, **kwargs: Any) -> None:
        super().save_base(raw=raw, using=using, **kwargs)
        self.noted = kwargs["force_insert"]

    def validate_constraints(self, **kwargs: Any) -> None:
        super().validate_constraints(**kwargs)
        self.is_validated = True

    def _get_unique_checks(self, **kwargs: Any) -> Any:
        return super()._get_unique_checks(**kwargs)  # type: ignore[misc]  # not in the stubs


def test_methods_of_a_base_class_behind_ours_get_arguments_by_name(rows: list[Photo]) -> None:
    with isolate_apps("tests.photos"):

        class NotedPhoto(Photo, NotedRow):
            class Meta:
                app_label = "photos_app"
                proxy = True

    photo: Any = NotedPhoto(user_id=ONE, title="noted")
    photo.full_clean(exclude=["photo_id"])
    assert photo.is_validated
    photo.save()
    assert photo.noted is False
    assert NotedPhoto.objects.create(user_id=ONE, title="created").noted is True


# -- Querysets with a create() of their own behind ours, as django-modeltranslation makes them


class NamingRows(models.QuerySet[Any]):
    def create(self, **kwargs: Any) -> Any:
        return super().create(**{"title": "named", **kwargs})


class RowsBehindOurs(ShardedQuerySet[Any], NamingRows):
    pass


def test_the_create_of_a_queryset_behind_ours_is_called(rows: list[Photo]) -> None:
    for photos in (
        RowsBehindOurs(Photo),
        RowsBehindOurs(Photo).filter(user_id=TWO),
        RowsBehindOurs(Photo, using="photos"),
        RowsBehindOurs(Photo, using=rows[0]._state.db),
    ):
        photo = photos.create(user_id=ONE)
        assert (photo.title, photo._state.db) == ("named", rows[0]._state.db)
        assert Photo.objects.get(user_id=ONE, pk=photo.pk).title == "named"


def test_the_create_of_a_queryset_behind_ours_does_not_keep_the_shard(rows: list[Photo]) -> None:
    photos = RowsBehindOurs(Photo)
    assert [photos.create(user_id=key)._state.db for key in (TWO, ONE)] == [
        rows[1]._state.db,
        rows[0]._state.db,
    ]
    assert photos.filter(user_id=ONE, title="named").count() == 1


# -- Querysets with a query of their own


class VisibleQuery(Query):
    """Adds a condition when it is compiled."""

    def get_compiler(self, *args: Any, **kwargs: Any) -> Any:
        self.add_q(models.Q(stars__gt=0))
        return super().get_compiler(*args, **kwargs)


class VisibleRows(ShardedQuerySet[Any]):
    def __init__(self, model: Any = None, query: Any = None, *args: Any, **kwargs: Any) -> None:
        super().__init__(model, query, *args, **kwargs)
        self.query = query or VisibleQuery(self.model)


def test_a_query_of_another_class_is_refused(rows: list[Photo]) -> None:
    with pytest.raises(UnknownExpression, match=r"VisibleQuery.*ShardedManager"):
        VisibleRows(Photo)
    with pytest.raises(UnknownExpression, match="VisibleQuery"):
        ShardedQuerySet(Photo, VisibleQuery(Photo))


def test_a_query_of_a_queryset_may_be_given_to_another(rows: list[Photo]) -> None:
    """As a pickled query is read again."""
    photos = Photo.objects.all()
    photos.query = Photo.objects.filter(user_id=ONE).query
    assert len(photos) == 2


# -- Queries with tables of their own, such as common table expressions


class OwnJoin:
    """Joins the photos once more, and is no Join of Django's."""

    filtered_relation = None
    join_type = INNER
    nullable = False

    def __init__(self, parent_alias: str) -> None:
        self.parent_alias, self.table_alias = parent_alias, "more"
        self.table_name = Photo._meta.db_table

    class join_field:
        class related_model:
            class _meta:
                local_concrete_fields = ()

    def equals(self, other: Any) -> bool:
        return self is other

    def relabeled_clone(self, change_map: Any) -> OwnJoin:
        return self

    def as_sql(self, compiler: Any, connection: Any) -> tuple[str, list[Any]]:
        return f"INNER JOIN {self.table_name} {self.table_alias} ON 1 = 1", []


def test_a_join_of_another_class_is_refused(rows: list[Photo]) -> None:
    photos = Photo.objects.filter(user_id=ONE)
    photos.query.join(OwnJoin(photos.query.get_initial_alias()))  # type: ignore[arg-type]
    with pytest.raises(UnknownExpression, match=r"OwnJoin.*using\(\)"):
        list(photos)
    with pytest.raises(UnknownExpression, match="OwnJoin"):
        photos.count()


# -- Iterable classes that change the query which they were given


class Marked(ModelIterable):
    """Names an annotation anew before it reads."""

    def __iter__(self) -> Any:
        query = self.queryset.query
        query.annotations = {f"_{name}": value for name, value in query.annotations.items()}
        query.set_annotation_mask([*query.annotations])
        return super().__iter__()


class Filtered(ModelIterable):
    def __iter__(self) -> Any:
        self.queryset.query.add_q(models.Q(title="p0"))
        return super().__iter__()


class Joined(ModelIterable):
    """Joins the album of each photo, if it has one."""

    def __iter__(self) -> Any:
        query = self.queryset.query
        query.setup_joins(["album"], query.get_meta(), query.get_initial_alias())
        return super().__iter__()


class Reading(ModelIterable):
    """Asks for the name of the first table, for which Django counts a reference."""

    def __iter__(self) -> Any:
        assert self.queryset.query.get_initial_alias() == Photo._meta.db_table
        return super().__iter__()


class Upper(ModelIterable):
    def __iter__(self) -> Any:
        for row in super().__iter__():
            row.title = row.title.upper()
            yield row


def read(iterable: Any, *keys: int) -> Any:
    photos = Photo.objects.filter(user_id__in=keys).annotate(double=models.F("stars") * 2)
    photos = photos.order_by("title")
    photos._iterable_class = iterable
    return list(photos)


def test_an_iterable_class_may_change_what_it_yields(rows: list[Photo]) -> None:
    titles = [row.title for row in read(Upper, ONE, TWO)]
    assert titles == ["P0", "P1", "P3", "P4"]


def test_an_iterable_class_may_read_the_query(rows: list[Photo]) -> None:
    assert [row.title for row in read(Reading, ONE, TWO)] == ["p0", "p1", "p3", "p4"]


@pytest.mark.parametrize(
    ("iterable", "titles"), [(Marked, ["p0", "p3"]), (Filtered, ["p0"]), (Joined, ["p0", "p3"])]
)
def test_an_iterable_class_may_change_the_query_of_one_shard_only(
    rows: list[Photo], iterable: Any, titles: list[str]
) -> None:
    assert [row.title for row in read(iterable, ONE)] == titles
    with pytest.raises(ScatterNotSupported, match="one shard at a time"):
        read(iterable, ONE, TWO)


# -- Managers that are not derived from ours


def test_a_manager_of_another_package_is_named_as_the_cause(rows: list[Photo]) -> None:
    manager: Any = models.Manager()
    manager.model = Photo
    with pytest.raises(ShardKeyRequired, match=r"filter by it.*ShardedManager"):
        list(manager.filter(user_id=ONE))


def test_a_content_type_finds_a_row_by_its_key_with_a_base_manager_that_routes(
    rows: list[Photo], monkeypatch: pytest.MonkeyPatch
) -> None:
    content_type = ContentType.objects.get_for_model(Photo)
    values = {"user_id": ONE, "pk": rows[0].pk}
    with pytest.raises(ShardKeyRequired, match='base_manager_name = "objects" in Meta'):
        content_type.get_object_for_this_type(**values)
    monkeypatch.setattr(Photo._meta, "base_manager_name", "objects")
    Photo._meta._expire_cache()
    try:
        assert content_type.get_object_for_this_type(**values) == rows[0]
        assert list(content_type.get_all_objects_for_this_type(user_id=TWO)) == [rows[1], rows[4]]
        with bound(user_id=ONE):
            assert content_type.get_object_for_this_type(pk=rows[0].pk) == rows[0]
    finally:
        monkeypatch.undo()
        Photo._meta._expire_cache()


# -- Relations that are added to a finished model


def test_a_generic_relation_that_is_added_later_is_one_of_ours(rows: list[Photo]) -> None:
    """As packages for activity streams register models."""
    with isolate_apps("tests.photos"):

        class Followed(Photo):
            class Meta:
                app_label = "photos_app"
                proxy = True

        GenericRelation(Memo).contribute_to_class(Followed, "memos")
    row: Any = Followed.objects.filter(user_id=ONE).first()
    memo = Memo.objects.create(id=1, name="memo", owner_id=ONE, content_object=row)
    assert list(row.memos.all()) == [memo]
    for delete in (row.delete, Followed.objects.filter(user_id=ONE).delete):
        with pytest.raises(DeletionRefused, match="Delete them first"):
            delete()
    memo.delete()
    assert row.delete()[0] == 1


def test_a_foreign_key_that_is_added_later_is_checked(rows: list[Photo]) -> None:
    albums = [Album.objects.create(owner_id=key, title="a") for key in (ONE, TWO)]
    with isolate_apps("tests.photos"):

        class Framed(OnPhotos):
            photo_id = TicketField(primary_key=True)
            user_id = models.BigIntegerField()
            title = models.CharField(max_length=200)

            class Meta:
                app_label = "photos_app"
                db_table = Photo._meta.db_table
                managed = False

        album = models.ForeignKey(Album, models.CASCADE, null=True, related_name="framed")
        Framed.add_to_class("album", album)
    row: Any = Framed.objects.get(user_id=ONE, pk=rows[0].pk)
    with pytest.raises(CrossKeyRelation):
        row.album = albums[1]
    row.album = albums[0]
    row.save()
    assert Photo.objects.get(user_id=ONE, pk=row.pk).album == albums[0]
    form: Any = modelform_factory(Framed, fields=["album"])(instance=row)
    assert list(form["album"].field.queryset) == [albums[0]]
