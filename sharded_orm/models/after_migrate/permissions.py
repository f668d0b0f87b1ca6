"""Permissions of users to view the shards of a group in the admin.

They exist if ``SHARDED_ORM["ADMIN"]["GROUP_PERMISSIONS"]`` is true.
"""

from __future__ import annotations

from typing import Any

from django.apps import AppConfig, apps
from django.db import DEFAULT_DB_ALIAS, router

from sharded_orm import runtime

APP_LABEL = "sharded_orm"
# Django attaches a permission to a model: here the model whose rows would be shards.
MODEL = "shardmap"


def codename(group: str) -> str:
    """Return the codename of the permission for ``group``, without the app label."""
    return f"access_{group}"


def may_access(user: Any, group: str) -> bool:
    """Whether the permissions of ``user`` allow viewing the shards of ``group``.

    If ``GROUP_PERMISSIONS`` is not set, every user may. Superusers always may. Costs one query per
    ``user`` object, which caches its permissions; Django's admin sends the same query anyway.
    """
    if not runtime.config().admin.group_permissions:
        return True
    return bool(user.has_perm(f"{APP_LABEL}.{codename(group)}"))


def after_migrate(
    sender: AppConfig, *, using: str = DEFAULT_DB_ALIAS, apps: Any = apps, **kwargs: Any
) -> None:
    """Receiver of ``post_migrate``: create those permissions for groups that do not exist yet.

    Django's own receiver, ``django.contrib.auth.management.create_permissions``, creates permissions
    of models only. It does not matter which receiver runs first. Permissions of removed groups stay,
    as Django's permissions of removed models do.
    """
    if using != DEFAULT_DB_ALIAS or not runtime.config().admin.group_permissions:
        return
    try:
        content_types = apps.get_model("contenttypes", "ContentType").objects
        permissions = apps.get_model("auth", "Permission").objects
    except LookupError:
        # These apps are not migrated yet. A later signal finds them: each migrate sends one for every app.
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
