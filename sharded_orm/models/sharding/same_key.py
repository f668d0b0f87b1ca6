"""Makes sure that related rows inside a group have the same shard key.

A row may refer only to rows of its own key. Rows of two keys may happen to be on one shard, but if
a key moved to another shard, the relation would break. And if the keys are tenants, one tenant's
rows must not be shown to another. ``ShardMeta.same_key = False`` allows relations to rows of other
keys on the same shard.

With the strategy ``embedded``, each row may have a key of its own, and related rows are put on one
shard on purpose. So relations in such a group may join different keys.

A stored row may have been read without its shard key (``only("name")``). Then one query loads the
key before a write, in a form, or when the reverse side of a one-to-one field is read
(``load=True``). Other reads do not load the key. A row of an automatic many-to-many table has no
key of its own, so the keys of the two rows that it relates are compared. If only one of the two is
in memory when a stored row is written, the other is loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from django.core.exceptions import ValidationError
from django.db.models import Model

from sharded_orm import runtime
from sharded_orm.exceptions import CrossKeyRelation
from sharded_orm.models.sharding.counted_ids import is_unique_over_shards
from sharded_orm.models.sharding.current_shard import unwrapped
from sharded_orm.models.sharding.key_errors import describe
from sharded_orm.models.sharding.options import (
    ShardOptions,
    options_of,
    required_options,
    shard_options,
)


def needs_same_key(options: ShardOptions, related: ShardOptions | None) -> bool:
    """Return whether a row and a related row must have the same shard key.

    :param options: the options of the row's model.
    :param related: the options of the related row's model; None if its rows are global.
    """
    return (
        related is not None
        and related.group == options.group
        and options.same_key
        and related.same_key
        and options.key is not None
        and related.key is not None
        and not runtime.strategy(options.group).embedded
    )


def relates_one_key(options: ShardOptions) -> bool:
    """Return whether the two rows that a row of a many-to-many table relates must have one key.

    :param options: the options of the model of the table, which Django has made automatically.
    """
    ends = [shard_options(relation.related_model) for relation in options.relations]
    owner = ends[0]
    return owner is not None and needs_same_key(owner, ends[1])


def known_key(options: ShardOptions, instance: Any, *, load: bool = False) -> Any:
    """Return the shard key of ``instance`` as the database stores it, or None if it is unknown.

    The key is unknown if it is not set, not loaded, or computed by the database.

    :param load: whether to load the key of a stored row if the key was deferred.
    """
    key = options.key
    row = unwrapped(instance)
    if load and key is not None and not row._state.adding:
        getattr(row, key.attname)
    value = None if key is None else row.__dict__.get(key.attname)
    if key is None or value is None or hasattr(value, "resolve_expression"):
        return None
    return key.get_prep_value(value)


def refuse_two_keys(field: Any, instance: Model, other: Any, *, load: bool = False) -> None:
    """Raise :exc:`CrossKeyRelation` if ``instance`` must not refer to ``other`` by ``field``.

    Nothing is checked if the foreign key ``field`` is itself the shard key of one of the two rows.
    Then this row gets its key from the other row, so the two cannot differ.

    :param field: the relation between the two, declared by either side; None for a row of an
        automatic many-to-many table.
    :param load: whether to load a key that was deferred, as a write must do.
    """
    options, related = options_of(instance), options_of(other)
    if options is None or related is None or not needs_same_key(options, related):
        return
    if gives_key(field, options) or gives_key(field, related):
        return
    own = known_key(options, instance, load=load)
    others = known_key(related, other, load=load)
    if own is not None and others is not None and own != others:
        name = None if field is None else field.name
        raise cross_key_relation(describe(instance), own, describe(other), others, name)


def refuse_related_of_other_key(instance: Model, written: Iterable[str] | None = None) -> None:
    """Raise :exc:`CrossKeyRelation` if ``instance`` refers to an instance of a different key.

    Only relations whose instance is in memory are checked.

    :param written: names of the fields that are about to be written; None for all. A deferred key
        is loaded only for relations among these fields.
    """
    if not instance._state.fields_cache:
        return  # The cache of relations is empty, so there is no related instance to compare with.
    referred: list[Any] = []
    field: Any
    for field in (*instance._meta.concrete_fields, *instance._meta.private_fields):
        other = field.get_cached_value(instance, default=None) if field.is_relation else None
        if isinstance(other, Model):
            # Find the field that stores the relation. For a generic foreign key, which has no column,
            # this is the field with the id of the other row.
            column: Any = instance._meta.get_field(getattr(field, "fk_field", field.name))
            names = {column.name, column.attname}
            load = written is None or not names.isdisjoint(written)
            refuse_two_keys(field, instance, other, load=load)
            referred.append(other)
    options = options_of(instance)
    if options is None or options.key is not None or not referred:
        return
    # A row of an automatic many-to-many table has no key of its own, so compare the keys of the two
    # rows that it relates.
    if len(referred) == 1 and not instance._state.adding and relates_one_key(options):
        # Only one of the two rows is in memory, so load the other.
        referred = [getattr(instance, relation.name) for relation in options.relations]
    if len(referred) == 2:
        refuse_two_keys(None, *referred, load=True)


def refuse_values_of_other_key(options: ShardOptions, key: Any, values: Mapping[str, Any]) -> None:
    """Raise :exc:`CrossKeyRelation` if ``values`` contain an instance whose key is not ``key``.

    Only instances that need the same key as the row are checked.

    :param options: the options of the row's model.
    :param key: the row's shard key, as the database stores it.
    :param values: maps field names to the row's values, such as ``{"album": album}``.
    """
    for name, other in joined_instances(options, values).items():
        others = known_key(required_options(other.__class__), other, load=True)
        if others is not None and others != key:
            row = f"A row of {options.model.__name__}"
            raise cross_key_relation(row, key, describe(other), others, name)


def joined_instances(options: ShardOptions, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the items of ``values`` whose instances must have the same shard key as the row.

    :param options: the options of the row's model.
    :param values: maps field names to the row's values, such as ``{"album": album, "stars": 5}``.
        The result for this example is ``{"album": album}``.
    """
    return {
        name: other
        for name, other in values.items()
        if isinstance(other, Model)
        and needs_same_key(options, options_of(other))
        and name not in key_names(options)
    }


def key_for_related(
    model: type[Model], field: Any, instance: Any, *, load: bool = False
) -> dict[str, Any]:
    """Return the shard key for rows of ``model`` that are related to ``instance``.

    :return: the key of ``instance``, as ``{attribute name: value}``. Empty if the related rows need
        not have this key, if ``field`` itself is their shard key, or if the key is unknown.
    :param field: the foreign key or many-to-many field of the relation.
    :param load: whether to load the key of ``instance`` if the key was deferred.
    """
    own = options_of(instance)
    name = None if own is None else name_of_related_key(model, field, own)
    if own is None or name is None:
        return {}
    value = known_key(own, instance, load=load)
    return {} if value is None else {name: value}


def name_of_related_key(model: type[Model], field: Any, own: ShardOptions) -> str | None:
    """Return the attname of ``model``'s shard key if rows related by ``field`` must have one key.

    :return: None if the keys may differ, or if ``field`` itself is a shard key.
    :param field: the foreign key or many-to-many field of the relation.
    :param own: the options of the model at the other end of ``field``.
    """
    options = shard_options(model)
    if options is None or options.key is None or not needs_same_key(options, own):
        return None
    if gives_key(field, options) or gives_key(field, own):
        return None
    return options.key.attname


def with_key(
    model: type[Model], key: Mapping[str, Any], values: Mapping[str, Any]
) -> dict[str, Any]:
    """Return ``values`` for a new row of ``model``, with ``key`` added.

    If ``values`` contains a shard key already, ``key`` is not added.

    :param key: a dict ``{attribute name: value}``; empty if there is no key to add.
    """
    options = shard_options(model)
    if not key or options is None or not key_names(options).isdisjoint(values):
        return dict(values)
    return {**values, **key}


def gives_key(field: Any, options: ShardOptions) -> bool:
    """Return whether a row gets its shard key by the relation ``field``.

    For example, ``options`` may say that the shard key of a photo is the foreign key ``owner``.
    Then the id of the related owner is the key, and the two rows need no comparison of keys. If
    ``field`` is a generic relation, its object id must be the shard key.
    """
    key = options.key
    if field is None or key is None:
        return False
    # Get the name of the field that stores the id of the related row. A GenericRelation and a
    # GenericForeignKey have this name in different attributes.
    stored_in = getattr(field, "object_id_field_name", None) or getattr(field, "fk_field", None)
    return field is key or stored_in == key.name


def key_names(options: ShardOptions) -> set[str]:
    """Return the keyword arguments that set the shard key of a new row.

    For example, ``{"owner", "owner_id"}``. Empty for an automatic many-to-many table.
    """
    key = options.key
    if key is None:
        return set()
    return {key.name, key.attname} | ({"pk"} if key.primary_key else set())


def cross_key_relation(
    row: str, key: Any, related: str, related_key: Any, field: str | None
) -> CrossKeyRelation:
    """Return the error to raise if a row and a related row have different shard keys.

    :param row: a description of the row, for the message.
    :param related: a description of the related row.
    :param field: the name of the relation; None for a row of an automatic many-to-many table.
    """
    by = "" if field is None else f" by {field!r}"
    return CrossKeyRelation(
        f"{row}, with the shard key {key!r}, cannot be related{by} to {related}, with the shard key"
        f" {related_key!r}. Relate rows with the same shard key: rows of different keys are on one shard"
        " only by chance. If you accept that, set same_key = False in the ShardMeta of one of the models."
    )


def are_of_two_keys(row: Any, other: Any) -> bool:
    """Return whether two instances with the same primary key stand for two different rows.

    Two shards may have different rows with the same primary key. They have different shard keys.

    - The result is False if both instances were read from the same database, even if a key was
      changed in memory.
    - It is False if one of the instances was not read from a database.
    - It is False if the keys are equal, because the row may have moved to another shard with its
      key.
    - If a key is not loaded, or the table has no key, the result is True in general. It is False if
      the ids are unique over all shards, or if one of the databases is not a shard.
    - If the keys differ, it is True.
    """
    one, two = row._state.db, other._state.db
    if one == two or one is None or two is None or row._state.adding or other._state.adding:
        return False
    options = options_of(row)
    if options is None:
        return False
    try:
        # Do not load a deferred key.
        keys = [known_key(options, instance) for instance in (row, other)]
    except (TypeError, ValueError, ValidationError):
        return True  # One of the keys was changed in memory, and is none now.
    if None not in keys:
        return bool(keys[0] != keys[1])
    resolve = runtime.topology().resolve
    are_on_shards = resolve(one) is not None and resolve(two) is not None
    return are_on_shards and not is_unique_over_shards(row._meta.pk)
