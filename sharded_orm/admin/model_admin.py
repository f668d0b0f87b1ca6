"""The model admin of sharded models."""

from __future__ import annotations

from sharded_orm.admin.actions import ActionsMixin
from sharded_orm.admin.changelist_view import ChangeListMixin
from sharded_orm.admin.checks import ShardedModelAdminChecks
from sharded_orm.admin.delete_views import DeleteViewsMixin
from sharded_orm.admin.object_views import ObjectViewsMixin


class ShardedModelAdmin(ChangeListMixin, ActionsMixin, DeleteViewsMixin, ObjectViewsMixin):
    """``ModelAdmin`` for a sharded model: everything on the right shard.

    ::

        @admin.register(Photo)
        class PhotoAdmin(ShardedModelAdmin):
            list_display = ["title", "owner", "posted_at"]

    Takes all options of Django's. The changelist shows one shard, the rows of one key, or all
    shards; a row's URL carries its key; the key of a stored row is read-only.

    Hooks beside Django's: :meth:`has_shard_permission` and :meth:`get_queryset`, which is narrowed
    to the place that the request looks at.

    One instance serves all requests of its site, in any number of threads at a time: what
    belongs to a request is kept on the request.
    """

    checks_class = ShardedModelAdminChecks
