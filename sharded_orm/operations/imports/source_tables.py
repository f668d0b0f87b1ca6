"""The tables of an import's source (the unsharded database): how to read their rows, and how to
find the shard key of each row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from django.db.models import Field, Model, QuerySet

from sharded_orm.models.sharding.options import ShardOptions, required_options, target_field
from sharded_orm.operations.imports.stored_columns import StoredColumn, stored_columns
from sharded_orm.operations.relations import batched

#: The largest number of primary keys in one query.
LOOK_UPS = 500


@dataclass(frozen=True)
class SourceRow:
    """A row that was read from the source of an import.

    :param pk: the primary key.
    :param values: the values in the order of the table's columns.
    :param key: the shard key, as ``get_prep_value()`` of its field returns it. Routing strategies
        and the directory take keys in this form.
    """

    pk: Any
    values: tuple[Any, ...]
    key: Any


class SourceTable:
    """The table of a model in the database from which rows are imported.

    :param alias: the alias of that database.
    """

    def __init__(self, model: type[Model], alias: str) -> None:
        self.model = model
        self.alias = alias
        self.label = model._meta.label
        self.pk_fields: Sequence[Any] = model._meta.pk_fields
        #: The attribute names (``attname``) of the fields of the primary key.
        self.pk_names = [field.attname for field in self.pk_fields]

    @cached_property
    def columns(self) -> list[StoredColumn]:
        return stored_columns(self.model)

    @cached_property
    def _pk_places(self) -> list[int]:
        names = [column.name for column in self.columns]
        return [names.index(name) for name in self.pk_names]

    @cached_property
    def owner(self) -> Any:
        """The foreign key of an automatic many-to-many table to the model that declares the
        relation.

        None if this table is not an automatic many-to-many table.
        """
        source: Any = self.model._meta.auto_created
        if not source:
            return None
        (many,) = (
            field
            for field in source._meta.local_many_to_many
            if field.remote_field.through is self.model
        )
        return self.model._meta.get_field(many.m2m_field_name())

    @cached_property
    def options(self) -> ShardOptions:
        """The options (``ShardMeta``) of the model whose shard key the rows have.

        For an automatic many-to-many table, this is the model that declares the relation.
        """
        return required_options(self.model if self.owner is None else self.owner.related_model)

    @property
    def key_field(self) -> Field[Any, Any]:
        assert self.options.key is not None
        return self.options.key

    @cached_property
    def key_link(self) -> Any:
        """The foreign key to the parent row that has the shard key.

        None if this table itself has a column for the shard key.
        """
        if self.owner is not None or self.key_field.model is self.model:
            return self.owner
        return self.model._meta.get_ancestor_link(self.key_field.model)

    @property
    def anchor_field(self) -> Any:
        """The *anchor* of a row: the field that decides the shard key of the row.

        This is the shard key itself, or the foreign key to the parent row that has it
        (:attr:`key_link`).
        """
        return self.key_field if self.key_link is None else self.key_link

    @property
    def key_path(self) -> str:
        """The path of the shard key in Django queries of this table, such as ``photo__user_id``.

        The shard key may be in the table of a parent row.
        """
        name: str = self.key_field.attname
        return name if self.owner is None else f"{self.owner.name}__{name}"

    # ##### Reading #####

    def query(self, alias: str | None = None) -> QuerySet[Any]:
        """Return a query for all rows of this table in one database. It is a plain QuerySet of
        Django, which is not routed to shards.

        :param alias: the alias of the database; by default the database from which rows are
            imported.
        """
        # Drop the model's default order. It might join another table by INNER JOIN, and so leave
        # out rows whose related row does not exist.
        return QuerySet(self.model, using=alias or self.alias).order_by()

    def between(self, first: Any, last: Any) -> QuerySet[Any]:
        """Return the rows with primary keys above ``first`` and up to ``last``, sorted by primary
        key.

        :param first: a primary key; None for no lower limit.
        :param last: a primary key; None for no upper limit.
        """
        rows = self.query().order_by(*self.pk_names)
        if first is not None:
            rows = rows.filter(pk__gt=first)
        return rows if last is None else rows.filter(pk__lte=last)

    def read(self, rows: QuerySet[Any]) -> list[SourceRow]:
        """Execute the query set ``rows`` of this table, and return its rows as :class:`SourceRow`."""
        expressions = [column.expression() for column in self.columns]
        convert_key = self.key_field.get_prep_value
        read = []
        for *values, key in rows.values_list(*expressions, self.key_path):
            row = self._converted(values)
            read.append(SourceRow(self._pk(row), row, convert_key(key)))
        return read

    def stored(self, alias: str, pks: Iterable[Any]) -> dict[Any, tuple[Any, ...]]:
        """Return the values of rows on the shard ``alias``, as the database stores them, keyed by
        primary key.

        Rows that do not exist are left out.
        """
        expressions = [column.expression() for column in self.columns]
        rows = {}
        for batch in batched(pks, LOOK_UPS):
            for values in self.query(alias).filter(pk__in=batch).values_list(*expressions):
                row = self._converted(values)
                rows[self._pk(row)] = row
        return rows

    def anchors(self, alias: str, pks: Iterable[Any]) -> dict[Any, Any]:
        """Return the anchors of rows in the database ``alias``, keyed by primary key.

        The anchor of a row is its value of :attr:`anchor_field`, which is the shard key or a
        foreign key to the row that has it. Rows that do not exist are left out.
        """
        anchors = {}
        names = (*self.pk_names, self.anchor_field.attname)
        for batch in batched(pks, LOOK_UPS):
            for *pk, anchor in self.query(alias).filter(pk__in=batch).values_list(*names):
                converted = self.anchor_field.get_prep_value(anchor)
                anchors[pk[0] if len(pk) == 1 else tuple(pk)] = converted
        return anchors

    def linked_pks(self, alias: str, table: SourceTable, pks: Iterable[Any]) -> list[Any]:
        """Return the primary keys of rows of this table that get their shard key from rows of
        ``table``.

        :param alias: the alias of the database.
        :param pks: the primary keys of those rows of ``table``.
        """
        link = self.key_link
        found: list[Any] = []
        for batch in batched(pks, LOOK_UPS):
            targets = table.query(alias).filter(pk__in=batch)
            values = list(targets.values_list(link.target_field.attname, flat=True))
            rows = self.query(alias).filter(**{f"{link.attname}__in": values})
            found += rows.values_list(*self.pk_names)
        return [pk[0] if len(pk) == 1 else tuple(pk) for pk in found]

    def _converted(self, values: Iterable[Any]) -> tuple[Any, ...]:
        return tuple(
            column.from_database(value) for column, value in zip(self.columns, values, strict=True)
        )

    def _pk(self, values: Sequence[Any]) -> Any:
        places = self._pk_places
        return values[places[0]] if len(places) == 1 else tuple(values[place] for place in places)

    # ##### Ranges #####

    def ranges(self, size: int) -> Iterator[tuple[Any, Any]]:
        """Divide the table into ranges of ``size`` rows. Yield each range as the two arguments of
        :meth:`between`, for example (1000, 2000).

        The first range has no lower limit, and the last range has no upper limit. So a row that is
        inserted later is also in one of the ranges. Costs one query for each range.
        """
        last = None
        while True:
            bounds = list(self.between(last, None).values_list(*self.pk_names)[size - 1 : size])
            if not bounds:
                yield last, None
                return
            bound = bounds[0][0] if len(self.pk_names) == 1 else tuple(bounds[0])
            yield last, bound
            last = bound

    def to_json(self, pk: Any) -> list[Any] | None:
        """Return the primary key ``pk`` as a list of values that JSON can store; None if it is None."""
        if pk is None:
            return None
        values = pk if len(self.pk_names) > 1 else (pk,)
        return [value if isinstance(value, int) else str(value) for value in values]

    def from_json(self, values: Sequence[Any] | None) -> Any:
        if values is None:
            return None
        parts = [
            target_field(field).to_python(value)
            for field, value in zip(self.pk_fields, values, strict=True)
        ]
        return parts[0] if len(parts) == 1 else tuple(parts)


def describe_range(table: SourceTable, first: Any, last: Any) -> str:
    """Describe a range of primary keys by a text such as ``photos.Photo, primary keys after 1000 up
    to 2000``.
    """
    lower = "" if first is None else f" after {first!r}"
    upper = "" if last is None else f" up to {last!r}"
    return f"{table.label}, {f'primary keys{lower}{upper}' if lower or upper else 'all rows'}"
