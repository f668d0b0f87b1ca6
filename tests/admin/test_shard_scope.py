"""The scope of a request that is about a row."""

from __future__ import annotations

from django.test import RequestFactory

from sharded_orm import runtime
from sharded_orm.admin.base import options_of
from sharded_orm.admin.shard_scope import ShardScope, scope_of, set_scope
from tests.photos.models import Album, Board, Note, Photo


def test_each_group_has_a_scope_of_its_own() -> None:
    request = RequestFactory().get("/")
    here, there = runtime.shard("photos", 3), runtime.shard("pins", 2)
    assert scope_of(request, options_of(Album)).everywhere
    set_scope(request, ShardScope(options_of(Photo), shard=here, home=here))
    set_scope(request, ShardScope(options_of(Board), shard=there, home=there))
    assert scope_of(request, options_of(Note)).home == there
    assert scope_of(request, options_of(Album)).home == here
    # A later scope of the group holds for all its models.
    other = runtime.shard("photos", 4)
    set_scope(request, ShardScope(options_of(Album), shard=other, home=other))
    assert scope_of(request, options_of(Photo)).home == other
    assert scope_of(request, options_of(Board)).home == there
