"""Django's admin for sharded models, and pages about the shards themselves.

The import of this package registers the pages about the shards. The package is the ``admin`` module
of the app ``sharded_orm``, so Django's ``autodiscover()`` imports it.
"""

from __future__ import annotations

from django.contrib import admin

from sharded_orm.admin.fleet.site import register_fleet
from sharded_orm.admin.generic_inlines import (
    ShardedGenericStackedInline,
    ShardedGenericTabularInline,
)
from sharded_orm.admin.inlines import ShardedStackedInline, ShardedTabularInline
from sharded_orm.admin.model_admin import ShardedModelAdmin

__all__ = [
    "ShardedGenericStackedInline",
    "ShardedGenericTabularInline",
    "ShardedModelAdmin",
    "ShardedStackedInline",
    "ShardedTabularInline",
    "register_fleet",
]

register_fleet(admin.site)
