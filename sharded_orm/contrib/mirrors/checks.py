"""System checks of mirrors. The ids of the checks never change. No check queries a database.

============================  =====================================================
``sharded_orm_mirrors.E001``  ``mirror_of`` names no sharded model, or the mirror is not sharded
``sharded_orm_mirrors.E002``  a mirror of a mirror
``sharded_orm_mirrors.E003``  multi-table inheritance
``sharded_orm_mirrors.E004``  no primary key that identifies one row of the source
``sharded_orm_mirrors.E005``  a field that is no copy of a field of the source
``sharded_orm_mirrors.E006``  a foreign key with a constraint
``sharded_orm_mirrors.E007``  a condition that the mirror cannot follow
``sharded_orm_mirrors.E008``  ``verify_reads`` without what it needs
``sharded_orm_mirrors.E009``  the database itself deletes or changes rows of the source
``sharded_orm_mirrors.W010``  ``verify_reads`` with a base manager that does not verify reads
============================  =====================================================
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from django.apps import AppConfig
from django.core import checks
from django.db.models import QuerySet

from sharded_orm.contrib.mirrors.declaration import declared_mirrors, problems_of
from sharded_orm.contrib.mirrors.querysets import MirrorQuerySet


@checks.register(checks.Tags.models)
def check_mirrors(
    app_configs: Sequence[AppConfig] | None = None, **kwargs: Any
) -> list[checks.CheckMessage]:
    """Check the declarations of mirrors."""
    return [
        error
        for model in declared_mirrors()
        if app_configs is None or model._meta.app_config in app_configs
        for error in _messages_of(model)
    ]


def _messages_of(model: Any) -> Iterator[checks.CheckMessage]:
    for number, text in problems_of(model):
        yield checks.Error(
            f"{model._meta.label} cannot be a mirror: {text}.",
            obj=model,
            id=f"sharded_orm_mirrors.{number}",
        )
    verifies = getattr(model.ShardMeta, "verify_reads", False)
    if not verifies:
        return
    if not _verifies(model._default_manager):
        yield checks.Error(
            f"{model._meta.label} has verify_reads = True, and its default manager does not verify reads.",
            hint="objects = MirrorManager(), of sharded_orm.contrib.mirrors.querysets.",
            obj=model,
            id="sharded_orm_mirrors.E008",
        )
    elif not _verifies(model._base_manager):
        yield checks.Warning(
            f"{model._meta.label} has verify_reads = True, and its base manager does not verify reads:"
            " refresh_from_db(), deferred fields and foreign keys to it read the mirror alone.",
            hint='Name a MirrorManager in the class Meta of the model: base_manager_name = "objects".',
            obj=model,
            id="sharded_orm_mirrors.W010",
        )


def _verifies(manager: Any) -> bool:
    return issubclass(getattr(manager, "_queryset_class", QuerySet), MirrorQuerySet)
