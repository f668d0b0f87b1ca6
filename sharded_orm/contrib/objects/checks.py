"""System checks of objects and mappings. No check queries a database.

The fields that are kept in the bodies of objects are checked as Django checks model fields, with
the ids of Django.

===========================  =========================================================
``sharded_orm_objects.E001``  a reference or mapping names no class of objects
===========================  =========================================================
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from django.apps import AppConfig
from django.core import checks

from sharded_orm.checks.selection import models_to_check
from sharded_orm.contrib.objects.fields import Ref
from sharded_orm.contrib.objects.mapping import MappingEntry
from sharded_orm.contrib.objects.sharded_object import ShardedObject


@checks.register(checks.Tags.models)
def check_objects(
    app_configs: Sequence[AppConfig] | None = None, **kwargs: Any
) -> list[checks.CheckMessage]:
    """Check the fields of objects and the classes that mappings relate."""
    return [message for model in models_to_check(app_configs) for message in _check(model)]


def _check(model: Any) -> Iterator[checks.CheckMessage]:
    if issubclass(model, ShardedObject) and not model._meta.proxy:
        for field in model.body_fields():
            yield from field.check()
            if isinstance(field, Ref):
                yield from _check_class(field, "target", field)
    elif issubclass(model, MappingEntry):
        for side in ("near_class", "far_class"):
            yield from _check_class(model._sides, side, model)


def _check_class(owner: Any, name: str, obj: Any) -> Iterator[checks.CheckMessage]:
    try:
        target = getattr(owner, name)
    except (LookupError, ValueError) as exc:
        target = exc
    if not isinstance(target, type) or not issubclass(target, ShardedObject):
        yield checks.Error(
            f"It refers to {target!r}, which is no installed class of objects.",
            hint="Name a class that derives from ShardedObject, or its label.",
            obj=obj,
            id="sharded_orm_objects.E001",
        )
