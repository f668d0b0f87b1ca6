"""Creates and checks the permissions to view the shards of a group in Django's admin.

The permissions exist only if the setting ``SHARDED_ORM["ADMIN"]["GROUP_PERMISSIONS"]`` is true.
"""

from __future__ import annotations

from typing import Any

from django.apps import AppConfig, apps
from django.db import DEFAULT_DB_ALIAS, router

from sharded_orm import runtime

APP_LABEL = "sharded_orm"
# Every permission of Django belongs to a model. The permissions to view shards belong to ShardMap,
# the model of the admin's pages for shards.
MODEL = "shardmap"


def codename(group: str) -> str:
    """Return the codename of the permission to view the shards of ``group``, without the app label."""
    return f"access_{group}"


def may_access(user: Any, group: str) -> bool:
    """Whether ``user`` may view the shards of ``group``.

    True for superusers, and for every user if ``GROUP_PERMISSIONS`` is not set. Otherwise ``user``
    needs the permission of the group. Sends at most two queries per ``user`` object, which caches its
    permissions. Django's admin sends the same queries anyway.
    """
    if not runtime.config().admin.group_permissions:
        return True
    return bool(user.has_perm(f"{APP_LABEL}.{codename(group)}"))


def after_migrate(
    sender: AppConfig, *, using: str = DEFAULT_DB_ALIAS, apps: Any = apps, **kwargs: Any
) -> None:
    """Receiver of ``post_migrate``: create the missing permissions of shard groups.

    Each group has one permission. Django's own receiver (``create_permissions``) does not create
    it, because it only knows models. The two receivers may run in any order. Permissions of removed
    groups are kept, as Django keeps the permissions of removed models.
    """
    if using != DEFAULT_DB_ALIAS or not runtime.config().admin.group_permissions:
        return
    try:
        content_types = apps.get_model("contenttypes", "ContentType").objects
        permissions = apps.get_model("auth", "Permission").objects
    except LookupError:
        # The tables in which Django stores permissions do not exist yet, because auth or contenttypes
        # is not migrated. Each run of migrate sends post_migrate for each app, so a later signal
        # will do the work.
        return
    names_by_codename = {
        codename(group): f"Can access shards of {group}" for group in runtime.topology().groups
    }
    if not router.allow_migrate_model(using, permissions.model):
        return
    content_type, _ = content_types.using(using).get_or_create(app_label=APP_LABEL, model=MODEL)
    group_permissions = permissions.using(using).filter(content_type=content_type)
    existing = set(
        group_permissions.filter(codename__in=names_by_codename).values_list("codename", flat=True)
    )
    permissions.using(using).bulk_create(
        permissions.model(content_type=content_type, codename=code, name=name)
        for code, name in names_by_codename.items()
        if code not in existing
    )
