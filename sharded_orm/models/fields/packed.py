"""64-bit ids made of shard, type and a local number; the counter of the shard's table generates
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from copy import copy
from functools import lru_cache
from typing import Any

from django.db import DataError, connections, models
from django.db.models.constants import OnConflict

from sharded_orm.exceptions import PackedIDMismatch
from sharded_orm.ids.layout import PACKED, PackedLayout
from sharded_orm.models.fields.generated_id import (
    EmbeddedShardMixin,
    Insert,
    all_or_nothing,
    shard_of,
)
from sharded_orm.models.fields.generic_fields import BigAutoField
from sharded_orm.topology.model import Shard


class PackedIDField(EmbeddedShardMixin, BigAutoField):
    """A primary key made of the row's shard, its type and a local id (Pinterest, P1, P5).

    :param type_id: the number of this model among the models of its group; it must never change.
    :param layout: the widths of the three parts; by default 16, 10 and 36 bits.

    The group's strategy must be ``"embedded"`` with the same widths. The counter of the table on
    each shard (AUTO_INCREMENT, or a sequence on PostgreSQL) generates the ids, also for rows that
    other programs insert. ``migrate`` sets the counter to the id with local id 1 (see
    ``models/after_migrate/auto_increment.py``). The insert checks the new ids inside its
    transaction: if an id has another shard or type than expected, the insert raises
    :exc:`PackedIDMismatch`, and no row is stored. An explicit id must have the row's shard and this
    type.

    Cost of new rows: one INSERT. If no transaction is open, BEGIN and COMMIT are around it, except on
    PostgreSQL, where the INSERT itself checks the ids. If the INSERT returns no ids (INSERT IGNORE,
    or many rows on MySQL), one more query checks the ids. If all rows have explicit ids, the cost is
    only the INSERT.
    """

    layout: PackedLayout
    outermost = True
    description = "64-bit id of shard, type and local number"

    def __init__(
        self, *args: Any, type_id: int, layout: PackedLayout = PACKED, **kwargs: Any
    ) -> None:
        if not isinstance(layout, PackedLayout):
            raise TypeError(f"layout={layout!r} is no PackedLayout.")
        self.type_id = type_id
        self.layout = layout
        super().__init__(*args, **kwargs)

    def deconstruct(self) -> Any:
        name, _, args, kwargs = super().deconstruct()
        kwargs["type_id"] = self.type_id
        if self.layout != PACKED:
            kwargs["layout"] = self.layout
        # Migrations contain this import path, so it must stay valid if the class moves elsewhere.
        return name, "sharded_orm.models.fields.PackedIDField", args, kwargs

    def counted_on(self, shard: Shard) -> range:
        """Return all ids that the table on ``shard`` may generate: a range that begins at local id 1."""
        return _counted(self.layout, shard.number, self.type_id)

    def insert_rows(
        self,
        instances: Sequence[Any],
        alias: str,
        returning: Sequence[Any],
        insert: Insert,
        on_conflict: OnConflict | None = None,
        unique_fields: Sequence[Any] | None = None,
    ) -> list[Any]:
        shard = shard_of(alias)
        if shard is None:
            # The alias is not that of a shard. It may belong to a template schema, from which test
            # shards are cloned, or to the database that had the rows before sharding. There is no
            # shard number, so insert without a check of the ids.
            return insert(returning)
        explicit = [v for row in instances if (v := getattr(row, self.attname)) is not None]
        for value in explicit:
            self._check_given(value, shard)
        if len(explicit) == len(instances):
            return insert(returning)
        counted = self.counted_on(shard)
        connection: Any = connections[alias]
        # Some servers check the ids that an INSERT returns, and store no row if an id is wrong. On
        # them, an INSERT in autocommit mode needs no transaction around it.
        is_checked = self in returning and connection.ops.checks_returned_ids
        is_alone = is_checked and connection.get_autocommit() and not connection.in_atomic_block
        with nullcontext() if is_alone else all_or_nothing(alias):
            try:
                rows = insert(self._checked(returning, counted) if is_checked else returning)
            except DataError as exc:
                if (wrong_id := connection.ops.refused_id(exc)) is None:
                    raise
                raise self._mismatch(wrong_id, shard) from exc
            if rows and self in returning:
                position = list(returning).index(self)
                for row in rows:
                    if row[position] not in counted:
                        raise self._mismatch(row[position], shard)
            # The INSERT returned no ids, because it was INSERT IGNORE, or an INSERT of many rows on
            # MySQL. So search the table for wrong ids: those of another shard or another model.
            elif (foreign_id := self._foreign_id(alias, counted)) is not None:
                raise self._mismatch(foreign_id, shard, returned=False)
        return rows

    def _checked(self, returning: Sequence[Any], counted: range) -> list[Any]:
        """Return ``returning`` with this field replaced by a copy that checks the ids.

        If an INSERT returns an id for the copy that is not in ``counted``, the INSERT fails.

        :param returning: the fields whose values the INSERT returns.
        """
        checked: Any = copy(self)
        checked.returned_ids = counted
        return [checked if field is self else field for field in returning]

    def _check_given(self, value: Any, shard: Shard) -> None:
        parts = self.layout.unpack(self.get_prep_value(value))
        if (parts.shard, parts.type) != (shard.number, self.type_id):
            raise PackedIDMismatch(
                f"{self.model.__name__}.{self.name}={value!r} is {parts!r}, and the row is stored on"
                f" {shard.alias!r} with type {self.type_id!r}. Leave the id out, or give one of that"
                " shard and type."
            )

    def _foreign_id(self, alias: str, counted: range) -> int | None:
        """Return an id in the table that contains another shard or type than it should; else None.

        Sends one query.
        """
        below, above = {f"{self.name}__lt": counted.start}, {f"{self.name}__gte": counted.stop}
        # Use a plain QuerySet, because the model's own manager may hide rows.
        rows: Any = models.QuerySet(self.model).using(alias)
        rows = rows.filter(models.Q(**below) | models.Q(**above))
        value: int | None = rows.values_list(self.name, flat=True).first()
        return value

    def _mismatch(self, value: int, shard: Shard, *, returned: bool = True) -> PackedIDMismatch:
        counted = self.counted_on(shard)
        problem = f"{self.model._meta.db_table!r} on {shard.alias!r}"
        # If the INSERT returned no ids, the wrong id was found by a query of the table, and may
        # come from an earlier INSERT. The message says that this is possible.
        problem += f" counted {value!r}{'' if returned else ', or held it before'}, but its ids of"
        problem += (
            f" type {self.type_id!r} are {counted.start!r} to {counted[-1]!r}. No row was stored."
        )
        if value >= counted.stop:
            operations: Any = connections[shard.alias].ops
            sql = operations.set_counter_sql(self.model._meta.db_table, self.column, "N")
            return PackedIDMismatch(
                f"{problem} The local ids are used up: close the shard for new rows. Or a row with an id"
                " of another table has moved the counter, or the table was copied from another shard:"
                f" remove such rows, and run {sql} with the highest own id + 1 for N, or"
                f" {counted.start!r} if there is none."
            )
        return PackedIDMismatch(
            f"{problem} The table was made, emptied or copied without its first id: 'manage.py migrate"
            f" --database {shard.alias}' sets it."
        )


@lru_cache(maxsize=4096)
def _counted(layout: PackedLayout, shard_number: int, type_id: int) -> range:
    # Every insert asks for this range.
    return layout.counted(shard_number, type_id)
