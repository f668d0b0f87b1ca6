"""System checks of model admins that could not work."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib import admin
from django.db import models
from django.db.models import F
from django.test.utils import isolate_apps

from sharded_orm.admin import ShardedModelAdmin, ShardedTabularInline
from sharded_orm.admin.checks import check_sites
from sharded_orm.models import ShardedModel
from tests.photos.models import Album, Board, Comment, Person, Photo, Tag


class PlainPhotos(admin.TabularInline):  # type: ignore[type-arg]
    model = Photo


class PlainAlbums(admin.StackedInline):  # type: ignore[type-arg]
    model = Album


class Photos(ShardedTabularInline):
    model = Photo


def problem_ids(model: Any, base: Any = ShardedModelAdmin, **attributes: Any) -> list[str]:
    """The ids of all problems of a model admin with these attributes."""
    site = admin.AdminSite(name="checked")
    site.register(model, type("Checked", (base,), attributes))
    [model_admin] = site._registry.values()
    problems = [*model_admin.check(), *check_sites(sites=[site])]
    site._registry.clear()  # The site would stay in ``all_sites`` until it is garbage-collected.
    return [problem.id for problem in problems]


def test_django_s_own_classes_for_sharded_models() -> None:
    assert problem_ids(Photo, admin.ModelAdmin) == ["sharded_orm.E072"]
    assert problem_ids(Album, inlines=[PlainPhotos]) == ["sharded_orm.E071"]
    assert problem_ids(Person, admin.ModelAdmin, inlines=[PlainAlbums]) == ["sharded_orm.E071"]
    assert problem_ids(Album, inlines=[Photos]) == []
    assert problem_ids(Person, admin.ModelAdmin) == []


def test_the_registered_sites_are_checked() -> None:
    site = admin.AdminSite(name="checked")
    site.register(Photo, admin.ModelAdmin)
    ids = [problem.id for problem in check_sites() if problem.obj is admin.ModelAdmin]
    site._registry.clear()
    assert ids == ["sharded_orm.E072"]
    assert not [problem for problem in check_sites() if problem.obj is admin.ModelAdmin]


@pytest.mark.parametrize(
    "ordering",
    [["owner__username"], ["title", "-owner__username"], [F("owner__username").desc()], [F("owner__username")]],
)  # fmt: skip
def test_an_ordering_that_no_shard_can_make(ordering: list[Any]) -> None:
    assert problem_ids(Album, ordering=ordering) == ["sharded_orm.E073"]


@pytest.mark.parametrize("ordering", [["owner"], ["-owner_id"], ["owner__pk"], ["?"], None])
def test_orderings_within_a_shard(ordering: Any) -> None:
    assert problem_ids(Album, ordering=ordering) == []


def test_dates_of_another_database() -> None:
    assert problem_ids(Comment, ordering=["photo__posted_at"]) == []
    assert problem_ids(Comment, date_hierarchy="photo__posted_at") == []
    # No global model of the tests has a date, hence admin.E128.
    assert problem_ids(Comment, date_hierarchy="author__username") == [
        "admin.E128",
        "sharded_orm.E073",
    ]


@isolate_apps("tests.photos")
def test_foreign_keys_into_another_group() -> None:
    class Cross(ShardedModel):
        user = models.BigIntegerField()
        board = models.ForeignKey(Board, models.DO_NOTHING, db_constraint=False)
        tag = models.ForeignKey(Tag, models.DO_NOTHING, db_constraint=False)

        class Meta:
            app_label = "photos_app"

        class ShardMeta:
            group = "events"
            shard_key = "user"

    def warning_ids(**attributes: Any) -> list[str]:
        model_admin = type("Crosses", (ShardedModelAdmin,), attributes)(Cross, admin.site)
        problems = model_admin.check()
        assert {problem.id for problem in problems} <= {"sharded_orm.W074"}
        return [problem.msg.split()[0] for problem in problems]

    assert warning_ids() == ["'board'", "'tag'"]
    assert warning_ids(exclude=["board"]) == ["'tag'"]
    assert warning_ids(fields=["user"]) == []
    assert warning_ids(fieldsets=[(None, {"fields": [("user", "tag")]})]) == ["'tag'"]
    # The id of a board carries its shard.
    assert warning_ids(readonly_fields=["board", "tag"]) == ["'tag'"]
    assert warning_ids(fields=["user"], list_display=["user", "board", "tag"]) == ["'tag'"]
    assert warning_ids(fields=["user"], list_display=["user", "board_id", "tag_id"]) == []
