"""Find rows that refer to a row of another shard key, or to a global row that does not exist.

No database enforces either relation. A row of another key is refused by
:mod:`sharded_orm.models.sharding.same_key`, but only if the row is given as an instance. A foreign
key from a shard to the global database has no constraint.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from django.apps import apps
from django.db import Error, connections, router
from django.db.models import Field, ForeignKey, Model

from sharded_orm.models.sharding.options import ShardOptions, group_of, shard_options
from sharded_orm.models.sharding.same_key import needs_same_key
from sharded_orm.operations.nodes import Alive
from sharded_orm.operations.shards.status import error_line
from sharded_orm.operations.shards.table_reads import Sql, TableRead, TableRows
from sharded_orm.topology.model import Shard

#: A foreign key. In the stubs its model may be a text, such as "self".
Reference = Any
#: Size of a batch: the number of global rows that are looked up by one query.
LOOK_UPS = 500
#: Largest number of examples that are reported, for each relation of each shard.
EXAMPLES = 3


@dataclass(frozen=True, slots=True)
class CrossKeyPair:
    """Two rows that are related although their shard keys differ.

    :param row: the primary key of the row that refers to the other.
    :param related: the value by which the row refers to the other, mostly its primary key.
    """

    row: Any
    key: Any
    related: Any
    related_key: Any


@dataclass
class CrossKeyRows:
    """The rows of one shard that a relation joins to rows of another shard key.

    :param model: the label of the model that declares the relation ``field``.
    :param key_name: the name of the shard key's field in ``model``.
    :param related: the label of the model that the relation leads to.
    :param rows: number of rows, or of pairs if ``field`` is a many-to-many relation; if a sample was
        read, only those in the sample.
    """

    shard: Shard
    model: str
    field: str
    key_name: str
    related: str
    related_key_name: str
    rows: int = 0
    examples: list[CrossKeyPair] = dataclasses.field(default_factory=list)

    @property
    def problem(self) -> str:
        """A sentence about the rows, with the remedy."""
        example = self.examples[0]
        return (
            f"{_subject(self.rows, self.model, self.shard)} related by {self.field!r} to rows of"
            f" {self.related} with another shard key: row {example.row!r} has"
            f" {self.key_name}={example.key!r}, and row {example.related!r} of {self.related} has"
            f" {self.related_key_name}={example.related_key!r}. Relate them to rows of their own key, or"
            " set same_key = False in the ShardMeta of one of the models."
        )


@dataclass
class DanglingReferences:
    """The rows of one shard that refer by a foreign key to global rows that do not exist.

    :param model: the label of the model that declares the foreign key ``field``.
    :param related: the label of the global model.
    :param values: number of distinct values of the foreign key without a row.
    :param rows: number of rows with such a value; if a sample was read, only those in the sample.
    :param examples: some of the values.
    """

    shard: Shard
    model: str
    field: str
    related: str
    values: int = 0
    rows: int = 0
    examples: list[Any] = dataclasses.field(default_factory=list)

    @property
    def problem(self) -> str:
        """A sentence about the rows, with the remedy."""
        return (
            f"{_subject(self.rows, self.model, self.shard)} related by {self.field!r} to"
            f" {'a row' if self.values == 1 else f'{self.values} rows'} of {self.related} that"
            f" {'does' if self.values == 1 else 'do'} not exist: {self.field}={self.examples[0]!r}. Delete"
            f" them, give them another {self.field!r}, or make the missing"
            f" {'row' if self.values == 1 else 'rows'} again."
        )


@dataclass
class RelationScan:
    """A scan for broken relations, and its results.

    Not thread-safe: give each thread its own instance, and merge the instances with :meth:`add`.

    :param sample: number of rows to read from each table of each shard, drawn anew for each
        relation; None reads all rows.
    """

    sample: int | None
    cross_key: list[CrossKeyRows] = dataclasses.field(default_factory=list)
    dangling: list[DanglingReferences] = dataclasses.field(default_factory=list)
    #: Why relations could not be checked. The reason is stored under the alias of the shard if its
    #: rows could not be read, and under the model's label if global rows could not be looked up.
    errors: dict[str, str] = dataclasses.field(default_factory=dict)

    def read(self, wrapper: Any, shards: Sequence[Shard], alive: Alive) -> None:
        """Check the relations of the rows on ``shards``.

        ``shards`` must all be on one node and belong to one group.

        Cost: a sample takes one statement per relation and 256 shards. A scan of all rows takes one
        statement per relation and shard, as does any scan on SQLite. For foreign keys to global
        rows, there is one more query of the global database per 500 distinct values. Memory: the
        values of one batch, and a small record for each broken relation of a shard.

        :param wrapper: a connection object of the node. It belongs to no shard.
        :param alive: called after each batch, to report that the node answers.
        """
        if not shards:
            return
        one: Any = connections[shards[0].alias]
        for model in _models_of(shards[0].group):
            for relation in _relations_inside(model):
                self._read_keys(relation, one, wrapper, shards)
                alive()
            for reference in _references_outside(model):
                self._read_references(reference, one, wrapper, shards, alive)
                alive()

    def add(self, other: RelationScan) -> None:
        """Add to this object the results in ``other``, which come from another node."""
        self.cross_key += other.cross_key
        self.dangling += other.dangling
        self.errors.update(other.errors)

    def _read_keys(
        self, relation: _RelationInside, one: Any, wrapper: Any, shards: Sequence[Shard]
    ) -> None:
        table = TableRows(relation.table, one, self.sample)
        read = TableRead(
            one,
            relation.table,
            relation.fields,
            lambda prefix: relation.cross_key_sql(one.ops.quote_name, table, prefix),
        )
        by_alias: dict[str, CrossKeyRows] = {}
        together = self.sample is not None
        for shard, (*row, key, related, related_key) in read.rows(
            wrapper, shards, self.errors, together=together
        ):
            entry = by_alias.setdefault(shard.alias, relation.no_rows(shard))
            entry.rows += 1
            if len(entry.examples) < EXAMPLES:
                pk = row[0] if len(row) == 1 else tuple(row)
                entry.examples.append(CrossKeyPair(pk, key, related, related_key))
        self.cross_key += by_alias.values()

    def _read_references(
        self,
        reference: Reference,
        one: Any,
        wrapper: Any,
        shards: Sequence[Shard],
        alive: Alive,
    ) -> None:
        model: type[Model] = reference.model
        related = reference.related_model._meta.label
        counts = TableRows(model, one, self.sample).value_counts(reference)
        read = TableRead(one, model, [reference], counts)
        values = (
            (shard, value, count)
            for shard, (value, count) in read.rows(
                wrapper, shards, self.errors, together=self.sample is not None
            )
            if value is not None
        )
        by_alias: dict[str, DanglingReferences] = {}
        for batch in _batches(values):
            try:
                existing = _existing_values(reference, {value for _, value, _ in batch})
            except Error as exc:
                # This error comes from the global database, not from the node with the rows. So
                # report it under the model's label.
                self.errors[related] = f"its rows cannot be looked up ({error_line(exc)})"
                break
            for shard, value, count in batch:
                if value in existing:
                    continue
                entry = by_alias.setdefault(
                    shard.alias,
                    DanglingReferences(shard, model._meta.label, reference.name, related),
                )
                entry.values += 1
                entry.rows += count
                if len(entry.examples) < EXAMPLES:
                    entry.examples.append(value)
            alive()
        self.dangling += by_alias.values()


@dataclass(frozen=True)
class _RelationInside:
    """A relation whose two rows need the same shard key.

    :param table: the model with the foreign keys: the model that declares the relation, or the
        automatic many-to-many table.
    :param name: the name of the foreign key or many-to-many field.
    :param owner: the foreign key of ``table`` to the model that declares the relation; None if
        ``table`` is that model.
    :param related: the foreign key of ``table`` to the other model.
    """

    table: type[Model]
    name: str
    owner: Reference | None
    related: Reference

    @property
    def _owner_model(self) -> type[Model]:
        return self.table if self.owner is None else self.owner.related_model

    @property
    def fields(self) -> list[Field[Any, Any]]:
        """The columns of :meth:`cross_key_sql`."""
        rows = self.table._meta.pk_fields if self.owner is None else [self.owner]
        related_key = _key_of(self.related.related_model)
        return [*rows, _key_of(self._owner_model), self.related, related_key]

    def no_rows(self, shard: Shard) -> CrossKeyRows:
        other = self.related.related_model
        return CrossKeyRows(
            shard,
            self._owner_model._meta.label,
            self.name,
            _key_of(self._owner_model).name,
            other._meta.label,
            _key_of(other).name,
        )

    def cross_key_sql(self, quote: Any, table: TableRows, prefix: str) -> Sql:
        """Return the SELECT of the rows that are related to a row of another shard key."""
        joins = _Joins(quote, prefix)
        owner_path = [] if self.owner is None else [self.owner]
        key = joins.column("r", self.table, owner_path, _key_of(self._owner_model))
        other_key = joins.column(
            "r", self.table, [self.related], _key_of(self.related.related_model)
        )
        rows = self.fields[:-3]
        columns = [f"r.{quote(row.column)}" for row in rows]
        columns += [key, f"r.{quote(self.related.column)}", other_key]
        names = ", ".join(f"{column} c{number}" for number, column in enumerate(columns))
        # Of the table itself the statement reads foreign keys, some of them links to parents, and
        # those of its columns that the table has. Others may be in the tables of parents.
        own = [
            column
            for column in self.table._meta.local_concrete_fields
            if column.is_relation or column in self.fields
        ]
        source, params = table.source(prefix, own)
        return f"SELECT {names} FROM {source} r{joins.sql} WHERE {key} <> {other_key}", params


class _Joins:
    """The joins of a statement on one shard, along foreign keys and to the tables of parents."""

    def __init__(self, quote: Any, prefix: str) -> None:
        self._quote = quote
        self._prefix = prefix
        self._count = 0
        self.sql = ""

    def column(
        self, alias: str, model: type[Model], path: Iterable[Any], target: Field[Any, Any]
    ) -> str:
        """Add the joins from ``model`` to the table of ``target``, and return its column.

        :param alias: the alias of the table of ``model`` in the statement.
        :param path: foreign keys, from ``model`` to a model that has or inherits ``target``.
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


def _models_of(group: str) -> list[type[Model]]:
    """Return the models with a table of their own on the shards of ``group``, sorted by label."""
    models = [
        model
        for model in apps.get_models(include_auto_created=True)
        if model._meta.managed and not model._meta.proxy and group_of(model) == group
    ]
    return sorted(models, key=lambda model: model._meta.label)


def _relations_inside(model: type[Model]) -> Iterator[_RelationInside]:
    """Yield the relations in the table of ``model`` whose two rows need the same shard key."""
    options = _options(model)
    source: Any = model._meta.auto_created
    if source:
        for many in source._meta.local_many_to_many:
            if many.remote_field.through is model:
                owner: Any = model._meta.get_field(many.m2m_field_name())
                related: Any = model._meta.get_field(many.m2m_reverse_field_name())
                if needs_same_key(_options(source), shard_options(related.related_model)):
                    yield _RelationInside(model, many.name, owner, related)
        return
    for reference in _references(model):
        # The relation that is the shard key gives the key. A child's row has the key of its parent.
        if reference is options.key or reference.remote_field.parent_link:
            continue
        if needs_same_key(options, shard_options(reference.related_model)):
            yield _RelationInside(model, reference.name, None, reference)


def _references_outside(model: type[Model]) -> Iterator[Reference]:
    """Yield the foreign keys in the table of ``model`` to models of the global database."""
    for reference in _references(model):
        if shard_options(reference.related_model) is None:
            yield reference


def _references(model: type[Model]) -> Iterator[Reference]:
    for reference in model._meta.local_concrete_fields:
        if isinstance(reference, ForeignKey):
            yield reference


def _existing_values(reference: Any, values: set[Any]) -> set[Any]:
    """Return those of ``values`` that a row has to which ``reference`` may refer."""
    related, name = reference.related_model, reference.target_field.attname
    # Read where rows are written: a replica may not have the newest rows yet.
    rows = related._base_manager.using(router.db_for_write(related))
    existing: set[Any] = set()
    remaining = iter(values)
    while batch := list(islice(remaining, LOOK_UPS)):
        existing.update(rows.filter(**{f"{name}__in": batch}).values_list(name, flat=True))
    return existing


def _batches(
    values: Iterable[tuple[Shard, Any, int]],
) -> Iterator[list[tuple[Shard, Any, int]]]:
    remaining = iter(values)
    while batch := list(islice(remaining, 10 * LOOK_UPS)):
        yield batch


def _options(model: type[Model]) -> ShardOptions:
    options = shard_options(model)
    assert options is not None
    return options


def _key_of(model: type[Model]) -> Field[Any, Any]:
    key = _options(model).key
    assert key is not None
    return key


def _subject(rows: int, model: str, shard: Shard) -> str:
    return f"{rows} row{'' if rows == 1 else 's'} of {model} on {shard.alias!r} {'is' if rows == 1 else 'are'}"
