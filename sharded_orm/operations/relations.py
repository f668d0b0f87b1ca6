"""Find the relations whose two rows must have the same shard key, and check them by queries.

For example, a comment and its photo must belong to the same user. A foreign key constraint does not
check this: it accepts a comment of user 1 on a photo of user 2 that is on the same shard.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

from django.core.exceptions import ObjectDoesNotExist, ValidationError
from django.db.models import F, Field, ForeignKey, Model

from sharded_orm.models.querysets.sharded import ShardedQuerySet
from sharded_orm.models.sharding.options import required_options, shard_options, target_field
from sharded_orm.models.sharding.same_key import cross_key_relation, gives_key, needs_same_key
from sharded_orm.operations.shards.table_reads import Sql, TableRows

#: A foreign key. It has no precise type here, because Django's stubs allow its model to be a text
#: such as "self".
Reference = Any
#: The number of rows that one query looks up by their primary keys.
LOOK_UPS = 500

T = TypeVar("T")


@dataclass(frozen=True)
class RelationInside:
    """A foreign key or many-to-many field whose two rows need the same shard key.

    :param table: the model whose table stores the relation. For a foreign key, this is the model
        that declares it. For a many-to-many field, it is the automatic model between the two.
    :param name: the name of the foreign key or many-to-many field.
    :param owner: for a many-to-many field, the foreign key of ``table`` to the model that declares
        the field; for a foreign key, None.
    :param related: the foreign key of ``table`` to the other model.
    """

    table: type[Model]
    name: str
    owner: Reference | None
    related: Reference

    @property
    def owner_model(self) -> type[Model]:
        """The model that declares the relation."""
        return self.table if self.owner is None else self.owner.related_model

    @property
    def fields(self) -> list[Field[Any, Any]]:
        """The fields of the columns that :meth:`cross_key_sql` selects."""
        rows = self.table._meta.pk_fields if self.owner is None else [self.owner]
        related_key = key_of(self.related.related_model)
        return [*rows, key_of(self.owner_model), self.related, related_key]

    def cross_key_sql(self, quote: Any, table: TableRows, prefix: str) -> Sql:
        """Return a SELECT that finds the pairs of related rows with different shard keys.

        :param quote: a function that quotes the name of a column or table.
        :param table: the rows of the relation's table that the SELECT checks.
        :param prefix: SQL that is put before the name of each table, such as a quoted schema name
            and a dot.
        """
        joins = _Joins(quote, prefix)
        owner_path = [] if self.owner is None else [self.owner]
        key = joins.column("r", self.table, owner_path, key_of(self.owner_model))
        other_key = joins.column(
            "r", self.table, [self.related], key_of(self.related.related_model)
        )
        rows = self.fields[:-3]
        columns = [f"r.{quote(row.column)}" for row in rows]
        columns += [key, f"r.{quote(self.related.column)}", other_key]
        names = ", ".join(f"{column} c{number}" for number, column in enumerate(columns))
        source, params = table.source(prefix, _own_columns(self.table, self.fields))
        return f"SELECT {names} FROM {source} r{joins.sql} WHERE {key} <> {other_key}", params

    def refuse_other_keys(self, alias: str, pks: Sequence[Any]) -> None:
        """Raise :exc:`CrossKeyRelation` if two related rows have different shard keys. One query.

        :param alias: the alias of the shard on which the relation is checked.
        :param pks: primary keys of the rows of ``table`` to check.
        """
        key, related_key = key_of(self.owner_model), key_of(self.related.related_model)
        own = key.attname if self.owner is None else f"{self.owner.name}__{key.attname}"
        other = f"{self.related.name}__{related_key.attname}"
        row = "pk" if self.owner is None else self.owner.attname
        rows: Any = ShardedQuerySet(self.table).using(alias).filter(pk__in=pks)
        rows = rows.filter(**{f"{other}__isnull": False}).exclude(**{other: F(own)})
        first = rows.values_list(row, own, self.related.attname, other).first()
        if first is not None:
            pk, value, related_pk, related_value = first
            raise cross_key_relation(
                f"{self.owner_model.__name__}(pk={pk!r})",
                value,
                f"{self.related.related_model.__name__}({self.related.target_field.name}={related_pk!r})",
                related_value,
                self.name,
            )


class _Joins:
    """Builds the JOINs of a statement on one shard.

    A JOIN follows a foreign key, for example from a comment to its photo, or leads from the table
    of a child model to the table of its parent model.
    """

    def __init__(self, quote: Any, prefix: str) -> None:
        self._quote = quote
        self._prefix = prefix
        self._count = 0
        self.sql = ""

    def column(
        self, alias: str, model: type[Model], path: Iterable[Any], target: Field[Any, Any]
    ) -> str:
        """Add the JOINs that are needed to read the field ``target``. Return the SQL of its column.

        :param alias: the alias that the table of ``model`` has in the statement. The JOINs begin
            at this table.
        :param path: the foreign keys to follow, from ``model`` to a model with the field
            ``target``, which may be inherited.
        """
        for link in path:
            alias, model = self._join(alias, link), link.target_field.model
        for step in model._meta.get_path_to_parent(target.model):
            alias = self._join(alias, step.join_field)
        return f"{alias}.{self._quote(target.column)}"

    def _join(self, alias: str, link: Any) -> str:
        self._count += 1
        joined, target = f"j{self._count}", link.target_field
        table = f"{self._prefix}{self._quote(target.model._meta.db_table)}"
        self.sql += (
            f" JOIN {table} {joined}"
            f" ON {joined}.{self._quote(target.column)} = {alias}.{self._quote(link.column)}"
        )
        return joined


def _own_columns(model: type[Model], fields: Sequence[Any]) -> list[Any]:
    """Return the columns that a statement about ``fields`` reads from the table of ``model``.

    Some of ``fields`` may be inherited. Their columns are in the table of the parent model, which
    is joined by a foreign key. So all foreign keys in the table of ``model`` are included.
    """
    own = model._meta.local_concrete_fields
    return [column for column in own if column.is_relation or column in fields]


def relations_inside(model: type[Model]) -> Iterator[RelationInside]:
    """Yield the relations in the table of ``model`` whose two rows need the same shard key."""
    options = required_options(model)
    source: Any = model._meta.auto_created
    if source:
        for many in source._meta.local_many_to_many:
            if many.remote_field.through is model:
                owner: Any = model._meta.get_field(many.m2m_field_name())
                related: Any = model._meta.get_field(many.m2m_reverse_field_name())
                if needs_same_key(required_options(source), shard_options(related.related_model)):
                    yield RelationInside(model, many.name, owner, related)
        return
    for reference in foreign_keys(model):
        # Skip a foreign key that is the shard key itself. Also skip the link from a child model to
        # its parent, because a child's row always has the shard key of its parent's row.
        if reference is options.key or reference.remote_field.parent_link:
            continue
        if needs_same_key(options, shard_options(reference.related_model)):
            yield RelationInside(model, reference.name, None, reference)


@dataclass(frozen=True)
class GenericReference:
    """A generic foreign key of a sharded model.

    :param model: the model whose own table has the columns of ``field``, the generic foreign key.
    """

    model: type[Model]
    field: Any

    @property
    def fields(self) -> list[Field[Any, Any]]:
        """The fields to read of each row, in this order.

        These are the primary key (one or several fields), the shard key, and the two fields of the
        generic foreign key: the content type and the id of the row to which it refers.
        """
        meta: Any = self.model._meta
        names = self.field.ct_field, self.field.fk_field
        return [*meta.pk_fields, key_of(self.model), *map(meta.get_field, names)]

    def sql(self, quote: Any, table: TableRows, prefix: str) -> Sql:
        """Return a SELECT that reads the references: the columns of :attr:`fields`, and a count.

        For example, a million comments of user 1 that all refer to photo 7 become one row of the
        result, with the smallest of their primary keys and the count 1,000,000. If the model has a
        composite primary key, each of its rows is a row of the result.

        The parameters are those of :meth:`RelationInside.cross_key_sql`.
        """
        joins = _Joins(quote, prefix)
        *pks, key, type_field, id_field = self.fields
        names = [f"r.{quote(pk.column)}" for pk in pks]
        reference = [f"r.{quote(field.column)}" for field in (type_field, id_field)]
        grouped = [joins.column("r", self.model, [], key), *reference]
        if len(names) == 1:
            names = [f"MIN({names[0]})"]
        else:
            grouped += names
        columns = [*names, *grouped[:3], "COUNT(*)"]
        source, params = table.source(prefix, _own_columns(self.model, self.fields))
        return (
            f"SELECT {', '.join(f'{column} c{number}' for number, column in enumerate(columns))}"
            f" FROM {source} r{joins.sql}"
            f" WHERE {' AND '.join(f'{column} IS NOT NULL' for column in reference)}"
            f" GROUP BY {', '.join(grouped)}",
            params,
        )

    def content_model(self, type_id: Any) -> type[Model] | None:
        """Return the model of a content type; None if the content type or its model does not exist."""
        try:
            model: type[Model] | None = self.field.get_content_type(id=type_id).model_class()
        except ObjectDoesNotExist:
            return None
        # Return None for a model with a composite primary key, because a generic foreign key cannot
        # store such a key, and so cannot refer to a row of this model.
        return None if model is None or len(model._meta.pk_fields) > 1 else model

    def needs_same_key(self, model: type[Model]) -> bool:
        """Return whether a row that refers to a row of ``model`` must have the same shard key."""
        options, related = required_options(self.model), shard_options(model)
        if related is None or not needs_same_key(options, related):
            return False
        return not gives_key(self.field, options) and not gives_key(self.field, related)

    def refuse_other_keys(self, alias: str, pks: Sequence[Any]) -> None:
        """Raise :exc:`CrossKeyRelation` if a row refers to a row with a different shard key.

        Costs one query for the rows, and one for each content type to which the rows refer.

        :param alias: the alias of the shard on which the rows are checked.
        :param pks: primary keys of the rows of ``model`` to check.
        """
        key, type_field, id_field = (field.attname for field in self.fields[-3:])
        rows: Any = ShardedQuerySet(self.model).using(alias).filter(pk__in=pks)
        by_type: dict[Any, list[Any]] = defaultdict(list)
        for pk, value, type_id, object_id in rows.values_list("pk", key, type_field, id_field):
            if type_id is not None and object_id is not None:
                by_type[type_id].append((pk, value, object_id))
        for type_id, referring in by_type.items():
            model = self.content_model(type_id)
            if model is None or not self.needs_same_key(model):
                continue
            keys = stored_keys(model, alias, [object_id for *_, object_id in referring])
            for pk, value, object_id in referring:
                related_key = keys.get(stored_pk(model, object_id), value)
                if related_key != value:
                    raise cross_key_relation(
                        f"{self.model.__name__}(pk={pk!r})",
                        value,
                        f"{model.__name__}(pk={object_id!r})",
                        related_key,
                        self.field.name,
                    )


def generic_references(model: type[Model]) -> Iterator[GenericReference]:
    """Yield the generic foreign keys whose columns are in the table of ``model``."""
    options = shard_options(model)
    for field in model._meta.private_fields if options is not None and options.key else ():
        # Skip a field that ``model`` inherits, because its columns are in the table of the parent.
        is_own = not getattr(field, "mti_inherited", False)
        if is_own and hasattr(field, "ct_field") and hasattr(field, "fk_field"):
            yield GenericReference(model, field)


def stored_keys(model: type[Model], alias: str, values: Iterable[Any]) -> dict[Any, Any]:
    """Return a dict that maps primary keys of ``model`` to the shard keys of these rows.

    Only rows in the database ``alias`` are found. If the model has no shard key, each primary key
    is mapped to None. One query per :data:`LOOK_UPS` distinct primary keys.

    :param values: primary keys as a generic relation stores them, for example as text. A value that
        is no row's primary key is ignored.
    """
    options = shard_options(model)
    pks = {stored_pk(model, value) for value in values} - {None}
    keys: dict[Any, Any] = {}
    for batch in batched(pks, LOOK_UPS):
        if options is None or options.key is None:
            rows = model._base_manager.using(alias).filter(pk__in=batch)
            keys.update(dict.fromkeys(rows.values_list("pk", flat=True)))
        else:
            rows = ShardedQuerySet(model).using(alias).filter(pk__in=batch)
            keys.update(rows.values_list("pk", options.key.attname))
    return keys


def stored_pk(model: type[Model], value: Any) -> Any:
    """Convert ``value`` to the type of the primary key of ``model``; None if no row can have it.

    For example, the text "7" becomes the integer 7, and the text "x" becomes None.
    """
    pk: Any = model._meta.pk
    try:
        pk = target_field(pk)
        value = pk.to_python(value)
        # Check that a number fits in the column: on SQLite, a query for a larger number fails.
        pk.run_validators(value)
    except (ValidationError, ValueError, TypeError, OverflowError):
        return None
    return value


def batched(values: Iterable[T], size: int) -> Iterator[list[T]]:
    remaining = iter(values)
    while batch := list(islice(remaining, size)):
        yield batch


def checked_relations(model: type[Model]) -> list[RelationInside | GenericReference]:
    """Return the relations in the table of ``model`` that :func:`refuse_other_keys` checks."""
    return [*relations_inside(model), *generic_references(model)]


def refuse_other_keys(model: type[Model], alias: str, pks: Iterable[Any]) -> None:
    """Raise :exc:`CrossKeyRelation` if rows of ``model`` are related to rows with another shard
    key.

    :param alias: the alias of the shard on which the relations are checked.
    :param pks: primary keys of the rows of ``model`` to check.
    """
    relations = checked_relations(model)
    for batch in batched(pks, LOOK_UPS) if relations else ():
        for relation in relations:
            relation.refuse_other_keys(alias, batch)


def foreign_keys(model: type[Model]) -> Iterator[Reference]:
    for reference in model._meta.local_concrete_fields:
        if isinstance(reference, ForeignKey):
            yield reference


def key_of(model: type[Model]) -> Field[Any, Any]:
    key = required_options(model).key
    assert key is not None
    return key
