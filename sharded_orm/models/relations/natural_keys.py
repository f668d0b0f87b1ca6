"""Natural keys in serialized rows: they are looked up in the database that has the rows.

Without ``using=``, ``serializers.deserialize()`` looks them up in the database ``default``. There a
sharded model has no table, or a table with old rows that a project has left there.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from django.core import serializers
from django.core.serializers import base
from django.db import DEFAULT_DB_ALIAS

from sharded_orm.models.sharding.options import shard_options


def install() -> None:
    """Let Django's deserializers look up natural keys of sharded models on the shards of their keys."""
    functions: Any = base
    build = functions.build_instance
    if hasattr(build, "__wrapped__"):  # the app's ready() has run before
        return

    @wraps(build)
    def build_instance(model: Any, data: Any, db: Any) -> Any:
        return build(model, data, alias_of_look_ups(model, db))

    functions.build_instance = build_instance
    functions.deserialize_fk_value = _routed(functions.deserialize_fk_value)
    functions.deserialize_m2m_values = _routed(functions.deserialize_m2m_values)
    # XML has methods of its own. Django imports the module when a program first uses a serializer.
    serializers.BUILTIN_SERIALIZERS["xml"] = "sharded_orm.models.relations.xml_rows"


def alias_of_look_ups(model: Any, alias: str | None) -> str | None:
    """Return the database in which natural keys of ``model`` are looked up; None if the key decides.

    :param alias: the database that the caller of the deserializer has named. ``default`` is also
        that of a caller who has named none. ``DeserializedObject.save()`` stores the rows of sharded
        models on the shards of their keys in both cases.
    """
    return None if alias == DEFAULT_DB_ALIAS and shard_options(model) is not None else alias


def _routed(look_up: Any) -> Any:
    @wraps(look_up)
    def routed(field: Any, value: Any, using: Any, handle_forward_references: Any) -> Any:
        alias = alias_of_look_ups(field.remote_field.model, using)
        return look_up(field, value, alias, handle_forward_references)

    return routed
