"""Find rows of an import's source (the unsharded database) that cannot be imported.

For example, such a row has no shard key, or refers to a row that does not exist.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from django.db import connections, router
from django.db.models import BinaryField, Exists, F, ForeignKey, Model, OuterRef, Q, QuerySet
from django.db.models.functions import Cast

from sharded_orm import runtime
from sharded_orm.exceptions import RoutingError
from sharded_orm.models.fields.generated_id import EmbeddedShardMixin
from sharded_orm.models.sharding.options import group_of, shard_options, target_field
from sharded_orm.operations.exceptions import ImportRefused
from sharded_orm.operations.imports.embedded_ids import refuse_id_of_other_shard
from sharded_orm.operations.imports.request import ImportRequest
from sharded_orm.operations.imports.source_tables import LOOK_UPS, SourceTable
from sharded_orm.operations.relations import (
    GenericReference,
    batched,
    generic_references,
    key_of,
    relations_inside,
    stored_keys,
    stored_pk,
)

_EXAMPLES = 3
_CHUNK = 2000


def row_problems(request: ImportRequest) -> Iterator[str]:
    """Yield a sentence for each kind of rows of the import's source that cannot be imported.

    Call this only if the tables exist on the source and have the columns of their models. Otherwise
    its queries fail.
    """
    for table in request.tables:
        yield from _null_problems(table)
        yield from _reference_problems(table, request)
        yield from _cross_key_problems(table)
        for generic in generic_references(table.model):
            yield from _generic_problems(table, generic, request)
        yield from _key_problems(table)
        yield from _embedded_id_problems(table)


def _found(rows: QuerySet[Any], name: str) -> tuple[int, str]:
    """Return the number of ``rows``, and a text with examples: some values of their column
    ``name``.
    """
    count = rows.count()
    if not count:
        return 0, ""
    return count, _examples(rows.order_by().values_list(name, flat=True).distinct()[:_EXAMPLES])


def _examples(values: Iterable[Any]) -> str:
    return ", ".join(map(repr, values))


def _null_problems(table: SourceTable) -> Iterator[str]:
    connection = connections[table.alias]
    with connection.cursor() as cursor:
        description = connection.introspection.get_table_description(
            cursor, table.model._meta.db_table
        )
    nullable = {column.name for column in description if column.null_ok}
    key = table.key_field if table.owner is None else None
    for column in table.columns:
        # Check only columns in which NULL would be wrong: the shard key, and a column that may be
        # NULL on the source but not in the model.
        if column.field is not key and (column.field.null or column.column not in nullable):
            continue
        name = column.name
        count, examples = _found(table.query().filter(**{f"{name}__isnull": True}), "pk")
        if count:
            what = "the shard key" if column.field is key else "which must have a value"
            yield (
                f"{count} rows of {table.label} on {table.alias!r} have {name}=NULL, {what} (pk"
                f" {examples}): give them a value"
            )


# ##### Foreign keys #####


def _reference_problems(table: SourceTable, request: ImportRequest) -> Iterator[str]:
    models = {other.model for other in request.tables}
    names = None
    for column in table.columns:
        reference: Any = column.field
        if not isinstance(reference, ForeignKey):
            continue
        related: Any = reference.related_model
        place = f"{table.label}.{reference.name}"
        group = group_of(related)
        if group == request.group and related._meta.concrete_model not in models:
            yield (
                f"{place} refers to {related._meta.label}, which is not imported: name this model,"
                " too"
            )
            continue
        if group is not None and group != request.group:
            if names is None:
                names = set(connections[table.alias].introspection.table_names())
            if related._meta.db_table not in names:
                yield (
                    f"{place} refers to {related._meta.label}, which has no table on"
                    f" {table.alias!r}: it is not known whether the rows exist"
                )
                continue
        count, examples = _dangling(table, reference, related, group)
        if count:
            yield (
                f"{count} rows of {table.label} refer by {reference.name!r} to rows of"
                f" {related._meta.label} that do not exist ({reference.attname} = {examples}):"
                " delete these rows, or make the missing ones again"
            )


def _dangling(
    table: SourceTable, reference: Any, related: type[Model], group: str | None
) -> tuple[int, str]:
    """Return how many rows of ``table`` refer to a row that does not exist, and a text with
    examples.

    :param reference: the foreign key of ``table`` that is checked.
    """
    name, target = reference.attname, reference.target_field.attname
    rows = table.query().filter(**{f"{name}__isnull": False})
    alias = table.alias if group is not None else router.db_for_write(related)
    existing: Any = QuerySet(related, using=alias)
    if alias == table.alias:
        missing = rows.filter(~Exists(existing.filter(**{target: OuterRef(name)})))
        return _found(missing, name)
    values = rows.order_by().values_list(name, flat=True).distinct()
    dangling: list[Any] = []
    for batch in batched(values.iterator(chunk_size=_CHUNK), LOOK_UPS):
        there = set(existing.filter(**{f"{target}__in": batch}).values_list(target, flat=True))
        dangling += [value for value in batch if value not in there]
    if not dangling:
        return 0, ""
    count = sum(
        rows.filter(**{f"{name}__in": batch}).count() for batch in batched(dangling, LOOK_UPS)
    )
    return count, _examples(dangling[:_EXAMPLES])


def _cross_key_problems(table: SourceTable) -> Iterator[str]:
    for relation in relations_inside(table.model):
        other = f"{relation.related.name}__{key_of(relation.related.related_model).attname}"
        rows = table.query().filter(**{f"{relation.related.attname}__isnull": False})
        rows = rows.annotate(
            sharded_orm_key=_exact(table.key_path, table.key_field),
            sharded_orm_other=_exact(other, table.key_field),
        )
        rows = rows.filter(~Q(sharded_orm_key=F("sharded_orm_other")))
        count, examples = _found(rows, "pk")
        if count:
            yield (
                f"{count} rows of {table.label} are related by {relation.name!r} to rows of"
                f" {relation.related.related_model._meta.label} with another shard key (pk"
                f" {examples}): relate them to rows of their own key, or set same_key = False in the"
                " ShardMeta of one of the models"
            )


def _exact(path: str, key: Any) -> Any:
    """Return an expression that makes the import's source compare shard keys character by
    character.

    The source may treat the texts "Ada" and "ada" as equal, depending on its collation. On the
    shards, they are two different keys.
    """
    if target_field(key).get_internal_type() in ("CharField", "TextField", "SlugField"):
        return Cast(F(path), BinaryField())
    return F(path)


# ##### Generic foreign keys #####


def _generic_problems(
    table: SourceTable, reference: GenericReference, request: ImportRequest
) -> Iterator[str]:
    models = {other.model for other in request.tables}
    *_, type_field, id_field = reference.fields
    names = table.key_path, type_field.attname, id_field.attname
    rows = table.query().order_by().values_list(*names).distinct()
    by_type: dict[Any, int] = defaultdict(int)
    for batch in batched(rows.iterator(chunk_size=_CHUNK), LOOK_UPS):
        referring: dict[Any, list[tuple[Any, Any]]] = defaultdict(list)
        for key, type_id, object_id in batch:
            if type_id is not None and object_id is not None:
                referring[type_id].append((key, object_id))
        for type_id, pairs in referring.items():
            model = reference.content_model(type_id)
            options = None if model is None else shard_options(model)
            if model is None or (
                options is not None
                and (options.group != request.group or model._meta.concrete_model not in models)
            ):
                by_type[type_id] += len(pairs)
                continue
            alias = table.alias if options is not None else router.db_for_write(model)
            keys = stored_keys(model, alias, [object_id for _, object_id in pairs])
            yield from _generic_pair_problems(table, reference, model, pairs, keys)
    for type_id, count in by_type.items():
        yield (
            f"{count} different rows are referred to by {table.label}.{reference.field.name} with the"
            f" content type {type_id!r}, whose model is not installed or not imported: name this"
            " model, too, or delete the rows"
        )


def _generic_pair_problems(
    table: SourceTable,
    reference: GenericReference,
    model: type[Model],
    pairs: list[tuple[Any, Any]],
    keys: dict[Any, Any],
) -> Iterator[str]:
    place, label = f"{table.label}.{reference.field.name}", model._meta.label
    missing = [value for _, value in pairs if stored_pk(model, value) not in keys]
    if missing:
        yield (
            f"{place} refers to rows of {label} that do not exist"
            f" ({_examples(missing[:_EXAMPLES])}): delete the referring rows, or make the missing"
            " ones again"
        )
    if reference.needs_same_key(model):
        others = [value for key, value in pairs if keys.get(stored_pk(model, value), key) != key]
        if others:
            yield (
                f"{place} refers to rows of {label} with another shard key"
                f" ({_examples(others[:_EXAMPLES])}): relate rows of one key only"
            )


# ##### Shard keys #####


def _key_problems(table: SourceTable) -> Iterator[str]:
    """Yield sentences about shard keys of the source that the group refuses, or that lead to no
    shard.
    """
    group = runtime.group(table.options.group)
    strategy = runtime.strategy(group.name)
    keys = table.query().filter(**{f"{table.key_path}__isnull": False}).order_by()
    values = keys.values_list(table.key_path, flat=True).distinct()
    prepare = table.key_field.get_prep_value
    without_shard: list[Any] = []
    for batch in batched(values.iterator(chunk_size=_CHUNK), LOOK_UPS):
        try:
            numbers = strategy.locate_many([prepare(key) for key in batch])
        except RoutingError as exc:
            yield f"{table.label} has a wrong shard key: {exc}"
            return
        without_shard += [key for key, number in numbers.items() if number is None]
    if without_shard and not strategy.places:
        yield (
            f"{len(without_shard)} shard keys of {table.label} have no shard in group"
            f" {group.name!r} ({_examples(without_shard[:_EXAMPLES])}): give the rows keys that the"
            f" strategy {group.strategy!r} takes, or add shards"
        )


def _embedded_id_problems(table: SourceTable) -> Iterator[str]:
    """Yield a sentence about the first row of the source with an id that names the wrong shard.

    An embedded id contains the number of a shard. This must be the shard of the row's shard key.
    """
    if not any(isinstance(column.field, EmbeddedShardMixin) for column in table.columns):
        return
    strategy = runtime.strategy(table.options.group)
    after = None
    while rows := table.read(table.between(after, None)[:_CHUNK]):
        numbers = strategy.locate_many({row.key for row in rows if row.key is not None})
        for row in rows:
            number = numbers.get(row.key)
            if number is None:
                continue
            try:
                refuse_id_of_other_shard(table, row, number)
            except ImportRefused as exc:
                yield exc.problems[0]
                return
        after = rows[-1].pk
