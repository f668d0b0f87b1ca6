"""System checks of model declarations and settings.

The ids of the checks never change. No check in this module queries a database.

==================  ==========================================================
``sharded_orm.E001``  ``ShardMeta`` is missing or incomplete
``sharded_orm.E002``  the group is not in ``SHARDED_ORM["GROUPS"]``
``sharded_orm.E003``  the shard key is not a concrete field of the model
``sharded_orm.E004``  the shard key may be NULL
``sharded_orm.W005``  a unique constraint does not contain the shard key
``sharded_orm.E009``  a composite primary key does not contain the shard key
``sharded_orm.E010``  ``ShardRouter`` is not in ``DATABASE_ROUTERS``
``sharded_orm.W011``  an auto-increment primary key is unique only within its shard
``sharded_orm.E012``  a child or proxy model has another group or shard key than its parent
``sharded_orm.E013``  the default manager makes querysets that are not ``ShardedQuerySet``
``sharded_orm.E015``  an id field has the shard number in other bits than the group expects
``sharded_orm.E016``  a ``type_id`` does not fit into its bits
``sharded_orm.E017``  two models of a group have the same ``type_id``
``sharded_orm.E018``  the group has too many shards for the bits in an id
``sharded_orm.E021``  a ``TimestampedIDField`` is not unique
``sharded_orm.E023``  ``order_with_respect_to`` orders rows of several shards
``sharded_orm.W037``  ``order_with_respect_to`` is a generic foreign key, which may leave the group
``sharded_orm.E050``  a text key has a collation that treats different keys as equal; see also
                      ``sharded_orm.checks.databases``, which reads the collations in databases
``sharded_orm.E083``  the group's strategy refuses all keys of the shard key's type
``sharded_orm.E077``  a model has a ``ShardMeta`` and is not sharded
``sharded_orm.W079``  a ``TicketField`` has no ticket servers
==================  ==========================================================
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from django.apps import AppConfig
from django.conf import settings
from django.core import checks
from django.core.exceptions import FieldDoesNotExist
from django.db import models
from django.db.models.expressions import OrderBy

from sharded_orm import runtime
from sharded_orm.checks.relations import check_relations, group_of_model
from sharded_orm.checks.selection import models_to_check
from sharded_orm.models.base import ShardedModel
from sharded_orm.models.cached.cached_model import collations_of
from sharded_orm.models.fields import PackedIDField, TicketField, TimestampedIDField
from sharded_orm.models.fields.generated_id import EmbeddedShardMixin
from sharded_orm.models.querysets.sharded import ShardedQuerySet
from sharded_orm.models.sharding.counted_ids import counts_per_shard
from sharded_orm.models.sharding.options import ShardOptions, shard_options, target_field
from sharded_orm.models.sharding.same_key import needs_same_key
from sharded_orm.models.text_keys import declared_inexact_collation, key_columns

ROUTER = "sharded_orm.routers.ShardRouter"


@checks.register(checks.Tags.models)
def check_models(
    app_configs: Sequence[AppConfig] | None = None, **kwargs: Any
) -> list[checks.CheckMessage]:
    """Check sharded models, and the relations of other models to them."""
    messages: list[checks.CheckMessage] = []
    declared = set()
    for model in models_to_check(app_configs):
        if issubclass(model, ShardedModel):
            errors = list(_declaration(model))
            messages += errors
            if errors and any(e.level >= checks.ERROR for e in errors):
                continue
            declared.add(model)
            messages += _type_of_key(model)
            messages += _collations(model)
            messages += _uniqueness(model)
            messages += _inheritance(model)
            messages += _order(model)
            messages += _manager(model)
        elif hasattr(model, "ShardMeta") and not hasattr(model, "_is_sharded"):
            messages.append(_not_sharded(model))
        messages += _embedded_ids(model)
        messages += _ticket_servers(model)
        messages += check_relations(model)
    if declared and ROUTER not in settings.DATABASE_ROUTERS:
        messages.append(
            checks.Error(
                f"{ROUTER!r} is not in DATABASE_ROUTERS.",
                hint=f"Add it as the last entry: DATABASE_ROUTERS = [..., {ROUTER!r}].",
                id="sharded_orm.E010",
            )
        )
    return messages


def _not_sharded(model: type[models.Model]) -> checks.CheckMessage:
    return checks.Error(
        f"{model.__name__} has a ShardMeta and is not sharded: its rows are in the global database.",
        hint="Derive it from ShardedModel; or from GlobalModel, if its rows are to stay there.",
        obj=model,
        id="sharded_orm.E077",
    )


def _declaration(model: type[ShardedModel]) -> Iterator[checks.CheckMessage]:
    meta = getattr(model, "ShardMeta", None)
    group, name = getattr(meta, "group", None), getattr(meta, "shard_key", None)
    if not group or not name:
        missing = "class ShardMeta" if meta is None else "ShardMeta.group or ShardMeta.shard_key"
        yield checks.Error(
            f"{model.__name__} has no {missing}.",
            hint="Declare class ShardMeta with group = '<a group of SHARDED_ORM>' and shard_key ="
            " '<a field>', or derive from GlobalModel.",
            obj=model,
            id="sharded_orm.E001",
        )
        return
    groups = runtime.topology().groups
    if group not in groups:
        yield checks.Error(
            f"ShardMeta.group {group!r} is not in SHARDED_ORM['GROUPS'].",
            hint=f"Use one of {sorted(groups)!r}, or add the group.",
            obj=model,
            id="sharded_orm.E002",
        )
    try:
        field = model._meta.get_field(name)
    except FieldDoesNotExist:
        field = None
    if not isinstance(field, models.Field) or not field.concrete or field.many_to_many:
        names = sorted(f.name for f in model._meta.concrete_fields)
        yield checks.Error(
            f"ShardMeta.shard_key {name!r} is no concrete field of {model.__name__}.",
            hint=f"Use one of {names!r}.",
            obj=model,
            id="sharded_orm.E003",
        )
        return
    if field.null:
        yield checks.Error(
            f"The shard key {name!r} may be NULL, and a row without a key has no shard.",
            hint="Remove null=True.",
            obj=field,
            id="sharded_orm.E004",
        )


def _type_of_key(model: type[ShardedModel]) -> Iterator[checks.CheckMessage]:
    options = shard_options(model)
    if options is None or options.key is None:
        return
    field = target_field(options.key)
    is_text = isinstance(field, models.CharField | models.TextField)
    if not is_text and not isinstance(field, models.IntegerField):
        return
    strategy = runtime.strategy(options.group)
    if strategy.accepts(str if is_text else int):
        return
    held = "text" if is_text else "an integer"
    yield checks.Error(
        f"The shard key {options.key.name!r} is {held}, and the strategy {strategy.group.strategy!r} of"
        f" group {options.group!r} cannot place it with its STRATEGY_OPTIONS.",
        hint='Use a key of another type, or a group with another strategy, such as "modulo". "range"'
        " takes the keys that can be compared with its BOUNDS; with SIZE, integers.",
        obj=options.key,
        id="sharded_orm.E083",
    )


def _columns(constraint: models.UniqueConstraint) -> set[str]:
    """Return the names of the fields whose values ``constraint`` compares.

    A field inside an expression, such as ``Lower("name")``, does not count.
    """
    names = set(constraint.fields)
    for expression in constraint.expressions:
        column = expression.expression if isinstance(expression, OrderBy) else expression
        if isinstance(column, models.F):
            names.add(column.name)  # type: ignore[attr-defined]  # the type stubs lack it
    return names


def _uniqueness(model: type[ShardedModel]) -> Iterator[checks.CheckMessage]:
    options = shard_options(model)
    if options is None or options.key is None:
        return
    key = options.key.name
    keys = {options.key.name, options.key.attname}
    hint = f"Add {key!r} to it, or rely on uniqueness within a shard knowingly."
    for field in model._meta.local_fields:
        if isinstance(field, EmbeddedShardMixin):
            # The values of this field contain the number of the shard, so they are unique in the
            # whole group. Give no warning.
            continue
        if isinstance(field, models.OneToOneField) and _is_on_one_shard(options, field):
            # Rows are on the same shard as the row that they refer to. So the unique constraint on
            # this shard sees all rows that refer to the same row. Give no warning.
            continue
        if field.unique and not field.primary_key and field.name != key:
            yield _only_per_shard(f"The unique field {field.name!r}", field, hint)
        for name in ("unique_for_date", "unique_for_month", "unique_for_year"):
            day = getattr(field, name)
            if day and field.name != key and (name, day) != ("unique_for_date", key):
                yield _only_per_shard(
                    f"{name} of the field {field.name!r}",
                    field,
                    "Declare a UniqueConstraint with the key instead, or rely on uniqueness within a"
                    " shard knowingly.",
                )
    for names in model._meta.unique_together:
        if keys.isdisjoint(names):
            yield _only_per_shard(f"unique_together {tuple(names)!r}", model, hint)
    for constraint in model._meta.constraints:
        if isinstance(constraint, models.UniqueConstraint) and keys.isdisjoint(
            _columns(constraint)
        ):
            yield _only_per_shard(f"UniqueConstraint {constraint.name!r}", model, hint)
    pk: Any = model._meta.pk
    if isinstance(pk, models.CompositePrimaryKey):
        if keys.isdisjoint(pk.field_names):
            yield checks.Error(
                f"The composite primary key {pk.field_names!r} does not contain the shard key"
                f" {key!r}, so it is unique on each shard only.",
                hint=f"Add {key!r} to it.",
                obj=model,
                id="sharded_orm.E009",
            )
    elif not pk.is_relation and counts_per_shard(pk) and not model.ids_are_internal:
        yield checks.Warning(
            f"The primary key {pk.name!r} counts on each shard by itself: rows of two shards can"
            " have the same one.",
            hint="Use TicketField(primary_key=True) for ids that are unique everywhere.",
            obj=model,
            id="sharded_orm.W011",
        )


def _collations(model: type[ShardedModel]) -> Iterator[checks.CheckMessage]:
    collations = collations_of(model)
    for key in key_columns(model):
        collation = declared_inexact_collation(key, collations)
        if collation is None:
            continue
        yield checks.Error(
            f"{key.field.name!r} tells the shard, and by its collation {collation!r} the database takes"
            " different keys for equal, such as 'Ada', 'ada' or 'Ada '.",
            hint=f"Declare {key.target.model._meta.label}.{key.target.name} as an ExactCharField"
            f"{collations.remedy}.",
            obj=key.field,
            id="sharded_orm.E050",
        )


def _order(model: type[ShardedModel]) -> Iterator[checks.CheckMessage]:
    # A field by now; the stubs know its name only.
    relation: Any = model._meta.order_with_respect_to
    options = shard_options(model)
    if options is None or relation is None or relation == options.key:
        return
    key = options.key.name if options.key is not None else ""
    if hasattr(relation, "fk_field"):
        # ``relation`` is a generic foreign key, which may refer to rows of any model. Its
        # declaration does not say whether these rows are all in the group, so give only a warning.
        if relation.fk_field != key:
            yield checks.Warning(
                f"order_with_respect_to = {relation.name!r} numbers rows on each shard apart. If one of"
                " them is about a row outside of the group, others about this row may be on several"
                " shards.",
                hint=f"Silence it if {relation.name!r} only refers to rows of group {options.group!r}."
                f" Otherwise make {relation.fk_field!r} the shard key, or use a field of your own for"
                " the order.",
                obj=model,
                id="sharded_orm.W037",
            )
        return
    # A field that is no relation has no remote_field.
    remote = relation.remote_field
    if remote is None and relation.name == key:
        return
    related = shard_options(remote.model) if remote is not None else None
    if related is None or related.group != options.group:
        one = remote.model.__name__ if remote is not None else f"value of {relation.name!r}"
        yield checks.Error(
            f"order_with_respect_to = {relation.name!r} numbers rows on each shard apart, and the rows of"
            f" one {one} may be on several.",
            hint="Use a relation inside the group, or the relation that is the shard key; or a field of"
            " your own for the order.",
            obj=model,
            id="sharded_orm.E023",
        )


def _inheritance(model: type[ShardedModel]) -> Iterator[checks.CheckMessage]:
    own = shard_options(model)
    others = [*model._meta.parents, model._meta.concrete_model]
    for other in others:
        if other in (model, None) or not issubclass(other, ShardedModel):
            continue
        theirs = shard_options(other)
        if own is None or theirs is None or (own.group, own.key) == (theirs.group, theirs.key):
            continue
        yield checks.Error(
            f"{model.__name__} has another ShardMeta than {other.__name__}, whose table holds"
            " its rows, too: they would be on a shard where the other key does not find them.",
            hint=f"Leave out its ShardMeta, which it inherits from {other.__name__}.",
            obj=model,
            id="sharded_orm.E012",
        )
        return


def _embedded_ids(model: type[models.Model]) -> Iterator[checks.CheckMessage]:
    """Check the id fields of ``model`` whose values contain the number of the row's shard.

    The group finds the shard of a row by some bits of the id. The field must store the number of
    the shard in the same bits.
    """
    options = shard_options(model)
    field: Any
    for field in model._meta.local_fields:
        if not isinstance(field, EmbeddedShardMixin):
            continue
        is_key = options is not None and options.key is field
        group = runtime.topology().groups.get(options.group) if options is not None else None
        strategy = runtime.strategy(group.name) if group is not None else None
        shift, bits = field.embedded_shard
        must_route = is_key or isinstance(field, PackedIDField)
        if strategy is None or (must_route and strategy.embedded != (shift, bits)):
            yield checks.Error(
                f"The ids of {field.name!r} hold their shard in {bits} bits above bit {shift}, and"
                f" {f'group {group.name!r}' if group else 'no shard group'} does not read it there.",
                hint='Use a group with STRATEGY "embedded" and STRATEGY_OPTIONS'
                f' {{"SHIFT": {shift}, "BITS": {bits}}}.',
                obj=field,
                id="sharded_orm.E015",
            )
        if group is not None and group.count > 1 << bits:
            yield checks.Error(
                f"The ids of {field.name!r} have {bits} bits for the shard, and group"
                f" {group.name!r} has {group.count} shards.",
                hint="Give the field a layout with more bits for the shard.",
                obj=field,
                id="sharded_orm.E018",
            )
        if isinstance(field, PackedIDField):
            yield from _type_id(model, field)
        if isinstance(field, TimestampedIDField) and not field.unique:
            yield checks.Error(
                f"{field.name!r} is not unique, and two processes may make the same id: the database"
                " has to tell.",
                hint="Set primary_key=True or unique=True.",
                obj=field,
                id="sharded_orm.E021",
            )


def _ticket_servers(model: type[models.Model]) -> Iterator[checks.CheckMessage]:
    if runtime.config().tickets:
        return
    for field in model._meta.local_fields:
        if isinstance(field, TicketField):
            yield checks.Warning(
                f"The ids of {field.name!r} come from ticket servers, and SHARDED_ORM['TICKETS'] names"
                " none: a row without an id cannot be saved.",
                hint='List the aliases of the pair: "TICKETS": ["tickets_1", "tickets_2"].',
                obj=field,
                id="sharded_orm.W079",
            )


def _type_id(model: Any, field: PackedIDField) -> Iterator[checks.CheckMessage]:
    value: Any = field.type_id
    last = (1 << field.layout.type_bits) - 1
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= last:
        yield checks.Error(
            f"type_id {value!r} of {field.name!r} does not fit into {field.layout.type_bits} bits.",
            hint=f"Use a number from 0 to {last}.",
            obj=field,
            id="sharded_orm.E016",
        )
    for other in model._meta.apps.get_models():
        if other is model or other._meta.proxy or group_of_model(other) != group_of_model(model):
            continue
        theirs: Any
        for theirs in other._meta.local_fields:
            if isinstance(theirs, PackedIDField) and theirs.type_id == value:
                yield checks.Error(
                    f"{model.__name__} and {other.__name__} both have type_id {value!r}, so their ids"
                    " are the same.",
                    hint="Give each model of a group a type_id of its own. It must not change once"
                    " there are rows.",
                    obj=field,
                    id="sharded_orm.E017",
                )


def _manager(model: type[ShardedModel]) -> Iterator[checks.CheckMessage]:
    manager = model._default_manager
    queryset = getattr(manager, "_queryset_class", ShardedQuerySet)
    if issubclass(queryset, ShardedQuerySet):
        return
    yield checks.Error(
        f"The default manager {manager.name!r} makes querysets of {queryset.__name__}, which do"
        " not route themselves: relations that span shards would lose rows.",
        hint="Derive it from ShardedManager, or its queryset from ShardedQuerySet.",
        obj=model,
        id="sharded_orm.E013",
    )


def _is_on_one_shard(options: ShardOptions, field: Any) -> bool:
    related = field.remote_field.model
    return not isinstance(related, str) and needs_same_key(options, shard_options(related))


def _only_per_shard(subject: str, obj: Any, hint: str) -> checks.CheckMessage:
    return checks.Warning(
        f"{subject} does not contain the shard key: it is unique on each shard only.",
        hint=hint,
        obj=obj,
        id="sharded_orm.W005",
    )
