"""Objects and mappings: schemaless data on shards (Pinterest, P5 to P9).

An app of Django: add ``"sharded_orm.contrib.objects"`` to ``INSTALLED_APPS``. See
docs/howto/objects-and-mappings.md and docs/decisions/0050-objects.md.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__all__ = [
    "Batch",
    "Cursor",
    "Mapping",
    "MirrorMapping",
    "ObjectLookup",
    "Page",
    "ShardedObject",
    "fields",
]

if TYPE_CHECKING:
    from sharded_orm.contrib.objects import fields
    from sharded_orm.contrib.objects.mapping import Mapping, MirrorMapping
    from sharded_orm.contrib.objects.object_lookup import ObjectLookup
    from sharded_orm.contrib.objects.object_queryset import Batch
    from sharded_orm.contrib.objects.page import Cursor, Page
    from sharded_orm.contrib.objects.sharded_object import ShardedObject

_MODULES = {
    "Batch": "object_queryset",
    "Cursor": "page",
    "Mapping": "mapping",
    "MirrorMapping": "mapping",
    "ObjectLookup": "object_lookup",
    "Page": "page",
    "ShardedObject": "sharded_object",
}


def __getattr__(name: str) -> Any:
    # Import a public name only when it is used first (PEP 562). Django imports this package before
    # models can be defined, and the modules with these names define models.
    if name == "fields":
        return import_module(f"{__name__}.fields")
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
