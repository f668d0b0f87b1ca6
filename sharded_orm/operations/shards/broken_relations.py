"""Find rows that refer to a row with a different shard key, or to a row that does not exist.

The database does not prevent such references. If code assigns an instance, as in ``comment.photo =
photo``, :mod:`sharded_orm.models.sharding.same_key` compares the shard keys of the two rows. If
code assigns an id, as in ``comment.photo_id = 7``, the shard keys are not compared. A foreign key
from a shard to the global database has no constraint, and a generic foreign key never has one. So
their rows may refer to rows that do not exist.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from django.apps import apps
from django.db import Error, connections, router
from django.db.models import Model

from sharded_orm.models.sharding.options import group_of, shard_options
from sharded_orm.operations.nodes import Alive
from sharded_orm.operations.relations import (
    LOOK_UPS,
    GenericReference,
    Reference,
    RelationInside,
    batched,
    foreign_keys,
    generic_references,
    key_of,
    relations_inside,
    stored_keys,
    stored_pk,
)
from sharded_orm.operations.shards.status import error_line
from sharded_orm.operations.shards.table_reads import TableRead, TableRows
from sharded_orm.scatter.failures import is_node_gone
from sharded_orm.topology.model import Shard

#: For each relation of each shard, a report shows at most this number of broken rows as examples.
EXAMPLES = 3


@dataclass(frozen=True, slots=True)
class CrossKeyPair:
    """Two rows that are related although their shard keys differ.

    :param row: the primary key of the row whose model declares the relation.
    :param key: the shard key of this row.
    :param related: the value by which the relation refers to the other row, usually its primary
        key.
    :param related_key: the shard key of the other row.
    """

    row: Any
    key: Any
    related: Any
    related_key: Any


@dataclass
class CrossKeyRows:
    """The rows of one shard that are related by one field to rows with a different shard key.

    :param model: the label of the model that declares ``field``, the foreign key or many-to-many
        field.
    :param key_name: the name of the shard key's field in ``model``.
    :param related: the label of the other model.
    :param related_key_name: the name of the shard key's field in the other model.
    :param rows: number of such rows. For a many-to-many field, the number of pairs of such rows. If
        only a sample was read, the number in the sample.
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
        """A sentence that says which rows are wrong, and what to do."""
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
    """The rows of one shard whose field refers to rows that do not exist.

    :param model: the label of the model that declares ``field``, a foreign key to a global model or
        a generic foreign key.
    :param related: the label of the model to which the missing rows belong.
    :param values: number of missing rows to which ``field`` refers. For a generic foreign key, a
        missing row is counted several times if rows with different shard keys refer to it: once for
        each of these shard keys.
    :param rows: number of rows that refer to a missing row. If only a sample was read, the number
        in the sample.
    :param examples: values of ``field`` for some of the missing rows.
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
        """A sentence that says which rows are wrong, and what to do."""
        return (
            f"{_subject(self.rows, self.model, self.shard)} related by {self.field!r} to"
            f" {'a row' if self.values == 1 else f'{self.values} rows'} of {self.related} that"
            f" {'does' if self.values == 1 else 'do'} not exist: {self.field}={self.examples[0]!r}. Delete"
            f" them, give them another {self.field!r}, or make the missing"
            f" {'row' if self.values == 1 else 'rows'} again."
        )


@dataclass
class RelationScan:
    """Searches for broken relations, and collects the results.

    Not thread-safe: give each thread its own instance, and merge the instances with :meth:`add`.

    :param sample: number of rows to read from each table of each shard; None reads all rows. A
        table with two relations is read twice, and the two samples may have different rows.
    """

    sample: int | None
    cross_key: list[CrossKeyRows] = dataclasses.field(default_factory=list)
    dangling: list[DanglingReferences] = dataclasses.field(default_factory=list)
    #: Why relations could not be checked. If the rows of a shard could not be read, maps the alias
    #: of the shard to the reason. If the rows of a global model could not be looked up, maps the
    #: label of the model to the reason.
    errors: dict[str, str] = dataclasses.field(default_factory=dict)

    def read(self, wrapper: Any, shards: Sequence[Shard], alive: Alive) -> None:
        """Check the relations of the rows on ``shards``, and add what is broken to the results.

        All ``shards`` must be on one node and belong to one group.

        Cost:

        - For each relation, one statement per 256 shards if only a sample is read. If all rows are
          read, and always on SQLite, one statement per shard.
        - For foreign keys to global rows and for generic foreign keys, one query of the global
          database per 500 distinct values.
        - For generic foreign keys to rows on the same shard, one query of the shard per 500
          distinct values of each content type.

        Memory: the values of one batch, and a small record for each broken relation of a shard.

        :param wrapper: a connection object of the node, for statements that name several shards.
        :param alive: called after each batch, to report that the node answers.
        """
        if not shards:
            return
        one: Any = connections[shards[0].alias]
        for model in _models_of(shards[0].group):
            for relation in relations_inside(model):
                self._read_keys(relation, one, wrapper, shards)
                alive()
            for reference in _references_outside(model):
                self._read_references(reference, one, wrapper, shards, alive)
                alive()
            for generic in generic_references(model):
                self._read_generic_references(generic, one, wrapper, shards, alive)
                alive()

    def add(self, other: RelationScan) -> None:
        """Add the results in ``other``, a scan of another node, to this scan."""
        self.cross_key += other.cross_key
        self.dangling += other.dangling
        self.errors.update(other.errors)

    def _read_keys(
        self, relation: RelationInside, one: Any, wrapper: Any, shards: Sequence[Shard]
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
            entry = by_alias.setdefault(shard.alias, _no_rows(relation, shard))
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
        for batch in batched(values, 10 * LOOK_UPS):
            try:
                existing = _existing_values(reference, {value for _, value, _ in batch})
            except Error as exc:
                # The global database has failed, not the node with the shards. So store the error
                # under the label of the global model, and not under the alias of a shard.
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

    def _read_generic_references(
        self,
        reference: GenericReference,
        one: Any,
        wrapper: Any,
        shards: Sequence[Shard],
        alive: Alive,
    ) -> None:
        table = TableRows(reference.model, one, self.sample)
        read = TableRead(
            one,
            reference.model,
            reference.fields,
            lambda prefix: reference.sql(one.ops.quote_name, table, prefix),
        )
        rows = read.rows(wrapper, shards, self.errors, together=self.sample is not None)
        broken = _BrokenGenericReferences(reference, self.errors)
        for batch in batched(rows, 10 * LOOK_UPS):
            broken.check(batch)
            # On SQLite, each shard that was read leaves a file open. Close all files but the last,
            # because the next batch may begin with the same shard.
            for alias in {shard.alias for shard, _ in batch} - {batch[-1][0].alias}:
                connections[alias].close()
            alive()
        self.cross_key += broken.cross_key.values()
        self.dangling += broken.dangling.values()


class _BrokenGenericReferences:
    """Finds the broken references of one generic foreign key.

    ``cross_key`` and ``dangling`` are dicts with the results. Their keys are pairs, such as
    ``("photos_00042", "blog.Post")``: the alias of the shard, and the label of the model to which
    its rows refer.
    """

    def __init__(self, reference: GenericReference, errors: dict[str, str]) -> None:
        self.cross_key: dict[tuple[str, str], CrossKeyRows] = {}
        self.dangling: dict[tuple[str, str], DanglingReferences] = {}
        self._reference = reference
        self._problems = errors

    def check(self, rows: Sequence[tuple[Shard, list[Any]]]) -> None:
        """Look up the rows to which ``rows`` refer, and record the references that are broken.

        A global model is looked up in the global database, and a model of the same group on the
        shard of the row that refers to it.

        :param rows: pairs of a shard and the columns of :meth:`GenericReference.sql`.
        """
        referring: dict[tuple[type[Model], Shard | None], list[Any]] = defaultdict(list)
        for shard, values in rows:
            model = self._reference.content_model(values[-3])
            group = None if model is None else group_of(model)
            # Skip a reference to a model of a different shard group. The reference contains only
            # the id of a row, so it is not known on which shard to look for this row.
            if model is not None and group in (None, shard.group):
                referring[model, shard if group else None].append((shard, values))
        for (model, place), rows_to_model in referring.items():
            alias = place.alias if place is not None else router.db_for_write(model)
            label = model._meta.label
            try:
                keys = stored_keys(model, alias, [values[-2] for _, values in rows_to_model])
            except Error as exc:
                if place is not None and is_node_gone(exc):
                    raise
                where = label if place is None else alias
                self._problems[where] = f"its rows cannot be looked up ({error_line(exc)})"
                continue
            for shard, values in rows_to_model:
                self._compare(shard, values, model, keys)

    def _compare(
        self, shard: Shard, values: list[Any], model: type[Model], keys: dict[Any, Any]
    ) -> None:
        *row, key, _, related, count = values
        own, name, label = self._reference.model, self._reference.field.name, model._meta.label
        place = shard.alias, label
        pk = stored_pk(model, related)
        if pk not in keys:
            missing = self.dangling.setdefault(
                place, DanglingReferences(shard, own._meta.label, name, label)
            )
            missing.rows += count
            missing.values += 1
            if len(missing.examples) < EXAMPLES:
                missing.examples.append(related)
        elif self._reference.needs_same_key(model) and keys[pk] != key:
            entry = self.cross_key.setdefault(
                place,
                CrossKeyRows(
                    shard, own._meta.label, name, key_of(own).name, label, key_of(model).name
                ),
            )
            entry.rows += count
            if len(entry.examples) < EXAMPLES:
                row_pk = row[0] if len(row) == 1 else tuple(row)
                entry.examples.append(CrossKeyPair(row_pk, key, related, keys[pk]))


def _no_rows(relation: RelationInside, shard: Shard) -> CrossKeyRows:
    owner, other = relation.owner_model, relation.related.related_model
    return CrossKeyRows(
        shard,
        owner._meta.label,
        relation.name,
        key_of(owner).name,
        other._meta.label,
        key_of(other).name,
    )


def _models_of(group: str) -> list[type[Model]]:
    """Return the models that have a table on the shards of ``group``, sorted by label."""
    models = [
        model
        for model in apps.get_models(include_auto_created=True)
        if model._meta.managed and not model._meta.proxy and group_of(model) == group
    ]
    return sorted(models, key=lambda model: model._meta.label)


def _references_outside(model: type[Model]) -> Iterator[Reference]:
    """Yield the foreign keys in the table of ``model`` to models of the global database."""
    for reference in foreign_keys(model):
        if shard_options(reference.related_model) is None:
            yield reference


def _existing_values(reference: Any, values: set[Any]) -> set[Any]:
    """Return those of ``values`` that exist in the column to which ``reference`` refers.

    :param reference: a foreign key to a global model.
    :param values: values of this foreign key.
    """
    related, name = reference.related_model, reference.target_field.attname
    # Read from the database for writes, because a replica may lack the newest rows.
    rows = related._base_manager.using(router.db_for_write(related))
    existing: set[Any] = set()
    for batch in batched(values, LOOK_UPS):
        existing.update(rows.filter(**{f"{name}__in": batch}).values_list(name, flat=True))
    return existing


def _subject(rows: int, model: str, shard: Shard) -> str:
    return f"{rows} row{'' if rows == 1 else 's'} of {model} on {shard.alias!r} {'is' if rows == 1 else 'are'}"
