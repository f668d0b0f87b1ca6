"""The model admin of sharded models."""

from __future__ import annotations

from sharded_orm.admin.actions import ActionsMixin
from sharded_orm.admin.changelist_view import ChangeListMixin
from sharded_orm.admin.checks import ShardedModelAdminChecks
from sharded_orm.admin.delete_views import DeleteViewsMixin
from sharded_orm.admin.object_views import ObjectViewsMixin


class ShardedModelAdmin(ChangeListMixin, ActionsMixin, DeleteViewsMixin, ObjectViewsMixin):
    """``ModelAdmin`` for a sharded model: each page queries the right shard.

    ::

        @admin.register(Photo)
        class PhotoAdmin(ShardedModelAdmin):
            list_display = ["title", "owner", "posted_at"]

    Takes all options of Django's ``ModelAdmin``. The changelist shows one shard, the rows of one
    shard key, or all shards. The URL of a row determines the row's shard, usually by the shard key.
    The shard key of a stored row is read-only.

    In addition to Django's hooks, there is :meth:`has_shard_permission`. The queryset that
    :meth:`get_queryset` returns is restricted to the scope of the request: one shard, one key or
    all shards.

    Thread-safe: one instance serves all requests of its site, in any number of threads. Data of a
    request is kept on the request object.
    """

    checks_class = ShardedModelAdminChecks
