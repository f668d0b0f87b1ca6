"""Makes the fields of a mirror from the fields of its source.

``ShardMeta.fields`` of the mirror names the fields to copy, or is ``"__all__"``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from django.apps import apps
from django.db.models import BigIntegerField, Field, GeneratedField, IntegerField

from sharded_orm.contrib.mirrors.exceptions import InvalidMirror
from sharded_orm.models.sharding.options import target_field

# A mirror's field does not get these options of the source's field. Its values come from the
# source, so it needs no defaults, and a mirror declares its indexes and unique fields itself.
_NOT_COPIED = frozenset(
    {"unique", "db_index", "db_column", "auto_now", "auto_now_add", "db_default", "default"}
)


def fields_of_mirror(name: str, attrs: Mapping[str, Any]) -> dict[str, Field[Any, Any]]:
    """Return the fields of a new mirror class that are copied from its source.

    A class gets such fields if its ``ShardMeta`` has ``fields``, or if it declares no field itself.

    :param name: the name of the class.
    :param attrs: the attributes in the body of the class.
    :raises InvalidMirror: the source is not loaded yet, or has no such field.
    """
    meta = attrs.get("ShardMeta")
    source_name = getattr(meta, "mirror_of", None)
    if source_name is None or getattr(attrs.get("Meta"), "abstract", False):
        return {}
    declared = [value for value in attrs.values() if isinstance(value, Field)]
    chosen = getattr(meta, "fields", None)
    if chosen is None and declared:
        return {}
    source = _source(name, attrs, source_name)
    key_name = getattr(meta, "shard_key", None)
    return {
        field.attname: _copy(field, is_key=key_name in (field.name, field.attname))
        for field in _chosen(name, source, chosen, key_name)
        if field.attname not in attrs and field.name not in attrs
    }


def _source(name: str, attrs: Mapping[str, Any], named: Any) -> Any:
    if not isinstance(named, str):
        return named
    app_label, _, model_name = named.rpartition(".")
    if not app_label:
        config = apps.get_containing_app_config(attrs["__module__"])
        app_label = config.label if config is not None else ""
    try:
        return apps.get_registered_model(app_label, model_name)
    except LookupError as exc:
        raise InvalidMirror(
            f"The fields of {name} come from its source {named!r}, which is not loaded yet. Define the mirror"
            " after it, import its module before, or declare the fields of the mirror."
        ) from exc


def _chosen(name: str, source: Any, chosen: Any, key_name: Any) -> Iterator[Any]:
    fields = [f for f in source._meta.concrete_fields if not isinstance(f, GeneratedField)]
    if chosen is None or chosen == "__all__":
        yield from fields
        return
    if isinstance(chosen, str) or not isinstance(chosen, Iterable):
        raise InvalidMirror(
            f"ShardMeta.fields of {name} is {chosen!r}; it must be a list of names."
        )
    wanted = set(chosen)
    known = {each for f in fields for each in (f.name, f.attname)}
    if unknown := sorted(map(str, wanted - known)):
        raise InvalidMirror(
            f"ShardMeta.fields of {name} names {unknown!r}, and its source {source._meta.label} has the fields"
            f" {sorted(f.attname for f in fields)!r}."
        )
    # The primary key and the shard key are always copied.
    wanted |= {source._meta.pk.name, key_name}
    yield from (f for f in fields if wanted & {f.name, f.attname})


def _copy(field: Any, *, is_key: bool) -> Field[Any, Any]:
    """Return a field that can store the values of ``field``.

    For a foreign key, this is a plain field for the id. For a field that generates ids, this is an
    integer field that generates none, because a mirror gets the ids of the source.
    """
    target = target_field(field)
    nullable = {"null": field.null and not is_key, "blank": field.blank}
    is_own = type(target).__module__.startswith("sharded_orm.")
    if isinstance(target, IntegerField) and (target.primary_key or is_own):
        return BigIntegerField(primary_key=field.primary_key, **nullable)
    _, _, arguments, options = target.deconstruct()
    options = {name: value for name, value in options.items() if name not in _NOT_COPIED}
    copied: Field[Any, Any] = type(target)(
        *arguments, **{**options, **nullable, "primary_key": field.primary_key}
    )
    return copied
