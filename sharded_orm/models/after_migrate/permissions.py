"""Permissions to view groups of shards: ``SHARDED_ORM["ADMIN"]["GROUP_PERMISSIONS"]``."""

from __future__ import annotations

from typing import Any

from django.apps import AppConfig, apps
from django.db import DEFAULT_DB_ALIAS, router

from sharded_orm import runtime

APP_LABEL = "sharded_orm"
# The permissions belong to the model that represents all shards.
MODEL = "shardmap"


def codename(group: str) -> str:
    """The codename of the permission for ``group``, without the app label."""
    return f"access_{group}"


def may_access(user: Any, group: str) -> bool:
    """Whether the permissions of ``user`` allow viewing ``group``.

    True for every user unless ``GROUP_PERMISSIONS`` is set. Superusers have every permission. One
    query per ``user`` object, which caches its permissions; Django's admin sends the same one.
    """
    if not runtime.config().admin.group_permissions:
        return True
    return bool(user.has_perm(f"{APP_LABEL}.{codename(group)}"))


def after_migrate(
    sender: AppConfig, *, using: str = DEFAULT_DB_ALIAS, apps: Any = apps, **kwargs: Any
) -> None:
    """Receiver of ``post_migrate``: create the missing permissions of groups.

    ``django.contrib.auth.management.create_permissions`` creates those of models only; the order
    of the two receivers does not matter. Permissions of removed groups stay, as Django's do.
    """
    if using != DEFAULT_DB_ALIAS or not runtime.config().admin.group_permissions:
        return
    try:
        content_types = apps.get_model("contenttypes", "ContentType").objects
        permissions = apps.get_model("auth", "Permission").objects
    except LookupError:
        return  # These apps are not migrated yet; each migrate sends the signal for all apps.
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
