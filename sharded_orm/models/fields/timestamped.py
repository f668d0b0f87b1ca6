"""64-bit ids that sort by time: each consists of milliseconds, shard and sequence number."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from datetime import datetime
from functools import cached_property
from itertools import zip_longest
from typing import Any

from django.db import IntegrityError, NotSupportedError, connections, models
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Value
from django.db.models.constants import OnConflict
from django.db.models.expressions import DatabaseDefault

from sharded_orm import runtime
from sharded_orm.backends.features import features_of
from sharded_orm.exceptions import CrossShardRelation, TimestampedIDMismatch
from sharded_orm.ids.layout import TIMESTAMPED, TimestampedLayout
from sharded_orm.ids.timestamps import TimestampClock, clock_of
from sharded_orm.models.fields.generated_id import (
    EmbeddedShardMixin,
    Insert,
    all_or_nothing,
    shard_of,
)
from sharded_orm.models.fields.generic_fields import BigIntegerField
from sharded_orm.models.fields.read_only_id import ReadOnlyIDMixin

# How many times the rows of an insert get new ids, if another process has already stored rows with
# the same ids. A new id is of a later millisecond, in which two processes rarely generate the same
# id. If even the last new ids are taken, something else is wrong, and the IntegrityError is raised.
TRIES = 10


class ColumnDefault(DatabaseDefault):
    """The keyword DEFAULT as the value of a column in an INSERT."""

    # Django's class computes these attributes for each row. Constants save this time.
    contains_aggregate = False
    contains_column_references = False
    contains_over_clause = False

    def resolve_expression(self, *args: Any, **kwargs: Any) -> ColumnDefault:
        # Overrides Django's method, which returns a resolved copy. DEFAULT contains nothing to
        # resolve, so no copy is needed.
        return self


class TimestampedIDField(EmbeddedShardMixin, ReadOnlyIDMixin, BigIntegerField):
    """An id that sorts by time and contains the number of the row's shard (Instagram, I2).

    :param epoch: an aware datetime from which milliseconds are counted; it must never change.
    :param layout: the widths of the three parts (by default 41, 13 and 10 bits) and the epoch. Pass
        either ``layout`` or ``epoch``.
    :param editable: True if serializers of Django REST framework should accept an id.

    On MySQL, MariaDB and SQLite, this field generates the id when the row is inserted. On
    PostgreSQL the column's default generates it. If the group's strategy is ``"embedded"`` with the
    same SHIFT and BITS, the id routes queries: a query by the id goes to the shard whose number is
    in the id. In any other group the id is unique over all shards, but does not route queries. If a
    row has an id already, it keeps the id. If ids route queries, this id must contain the number of
    the row's shard; otherwise the insert raises :exc:`CrossShardRelation`.

    Cost of a new row: one INSERT. On PostgreSQL, the first INSERT of a process on a shard has BEGIN
    and COMMIT around it. If another process has generated the same id, one more query finds the
    duplicate, and the INSERT is repeated with an id of a later millisecond.

    ``bulk_create()`` with ``ignore_conflicts`` or ``update_conflicts`` raises
    :exc:`NotSupportedError` if a row has no id. The reason is that another process may have stored
    an unrelated row with the id that is generated. The database would treat this as a conflict, and
    drop the new row or overwrite the other one. Nothing is raised in two safe cases: on PostgreSQL,
    and on SQLite with ``update_conflicts`` if ``unique_fields`` does not contain this field.
    """

    layout: TimestampedLayout
    description = "64-bit id that orders by time"

    def __init__(
        self,
        *args: Any,
        epoch: datetime | None = None,
        layout: TimestampedLayout | None = None,
        **kwargs: Any,
    ) -> None:
        if epoch is not None and layout is not None:
            raise TypeError("Give either epoch or layout, which holds the epoch.")
        if layout is not None and not isinstance(layout, TimestampedLayout):
            raise TypeError(f"layout={layout!r} is no TimestampedLayout.")
        self.layout = layout or (TimestampedLayout(epoch) if epoch else TIMESTAMPED)
        super().__init__(*args, **kwargs)

    @property
    def epoch(self) -> datetime:
        return self.layout.epoch

    @cached_property
    def _confirmed(self) -> set[str]:
        """The aliases of shards on which this process has seen the database generate a correct id."""
        return set()

    @cached_property
    def clock(self) -> TimestampClock:
        return clock_of(self.layout)

    def deconstruct(self) -> Any:
        name, _, args, kwargs = super().deconstruct()
        if self.layout == TimestampedLayout(self.epoch):
            kwargs["epoch"] = self.epoch
        else:
            kwargs["layout"] = self.layout
        # Migrations contain this import path, so it must stay valid if the class moves elsewhere.
        return name, "sharded_orm.models.fields.TimestampedIDField", args, kwargs

    def insert_rows(
        self,
        instances: Sequence[Any],
        alias: str,
        returning: Sequence[Any],
        insert: Insert,
        on_conflict: OnConflict | None = None,
        unique_fields: Sequence[Any] | None = None,
    ) -> list[Any]:
        new = [row for row in instances if getattr(row, self.attname) is None]
        if len(new) < len(instances):
            self._check_given(instances, alias)
        if not new:
            return insert(returning)
        connection = connections[alias]
        if features_of(connection).makes_timestamped_ids:
            return self._insert_default(instances, new, alias, returning, insert)
        if self._takes_for_conflict(connection, on_conflict, unique_fields):
            option = "ignore" if on_conflict == OnConflict.IGNORE else "update"
            raise NotSupportedError(
                f"bulk_create({option}_conflicts=True) on {alias!r} could take another process's row"
                f" for a conflict, by its {self.name!r}. Give the rows their ids, or use"
                f" {'get' if option == 'ignore' else 'update'}_or_create()."
            )
        try:
            self._fill(new, alias)
            rows = self._insert_filled(new, alias, returning, insert)
        except BaseException:
            # After a failed insert, set the ids back to None, so that the next save() generates new
            # ids.
            for row in new:
                setattr(row, self.attname, None)
            raise
        if on_conflict is not None:
            # The database does not report which rows were stored. Set all ids back to None, so that
            # a later save() does not use the id of a row that was not stored.
            for row in new:
                setattr(row, self.attname, None)
        # QuerySet.bulk_create() expects one result per row, even if the INSERT returned no rows.
        return rows or [()] * len(instances)

    def _takes_for_conflict(
        self,
        connection: BaseDatabaseWrapper,
        on_conflict: OnConflict | None,
        unique_fields: Sequence[Any] | None,
    ) -> bool:
        """Whether ``bulk_create()`` sees a conflict if a stored row has the id of a new row.

        Its INSERT would then drop the new row, or overwrite the stored row. But another process may
        have generated the same id, so the two rows may have nothing to do with each other.
        """
        has_target = connection.features.supports_update_conflicts_with_target
        if on_conflict == OnConflict.UPDATE and has_target:
            return self in (unique_fields or ()) or self.column in (unique_fields or ())
        # The statement does not say in which columns a duplicate is a conflict. Examples are INSERT
        # IGNORE and ON DUPLICATE KEY UPDATE on MySQL. So a duplicate in any unique column is a
        # conflict, and the column of this field is usually unique.
        return on_conflict is not None

    def _check_given(self, instances: Sequence[Any], alias: str) -> None:
        """Raise CrossShardRelation if an explicit id contains the number of another shard.

        The check is made only in a group whose strategy reads the shard from the id.
        """
        shard = shard_of(alias)
        if shard is None or runtime.strategy(shard.group).embedded != self.embedded_shard:
            return
        for row in instances:
            value = getattr(row, self.attname)
            if value is None:
                continue
            parts = self.layout.unpack(self.get_prep_value(value))
            if parts.shard != shard.number:
                raise CrossShardRelation(
                    f"{self.model.__name__}.{self.name}={value!r} is {parts!r}, and the row is stored"
                    f" on {shard.alias!r}. Leave the id out, or give one of that shard."
                )

    def _fill(self, rows: Sequence[Any], alias: str, *, again: bool = False) -> None:
        shard = shard_of(alias)
        # The alias may be that of a template schema, from which test shards are cloned. A template
        # has no shard number, so the ids of its rows contain 0.
        number = shard.number if shard is not None else 0
        table = f"{alias}.{self.model._meta.db_table}"
        if again:
            self.clock.leave(number, table)
        ids = self.clock.take(number, table, len(rows))
        for row, value in zip(rows, ids, strict=True):
            setattr(row, self.attname, value)

    def _insert_filled(
        self, new: list[Any], alias: str, returning: Sequence[Any], insert: Insert
    ) -> list[Any]:
        for _ in range(TRIES):
            try:
                # No savepoint is needed, even before a second attempt: MySQL and SQLite roll back
                # only the failed statement. This method is never called for PostgreSQL, which would
                # refuse the second attempt.
                return insert(returning)
            except IntegrityError:
                taken = self._taken(new, alias) if self.unique else []
                if not taken:
                    raise
                self._fill(taken, alias, again=True)
        return insert(returning)

    def _taken(self, rows: list[Any], alias: str) -> list[Any]:
        """Return those of ``rows`` whose ids the table contains already."""
        by_id = {getattr(row, self.attname): row for row in rows}
        connection = connections[alias]
        # Use a plain QuerySet, because the model's own manager may hide rows.
        stored: Any = models.QuerySet(self.model).using(alias)
        if connection.in_atomic_block and connection.features.has_select_for_update:
            # Inside a transaction, a plain SELECT may read a snapshot that is older than the row of
            # another process with the same id. A locking SELECT reads the latest rows.
            stored = stored.select_for_update()
        condition = {f"{self.name}__in": list(by_id)}
        ids = stored.filter(**condition).values_list(self.name, flat=True)
        return [by_id[value] for value in ids]

    def _insert_default(
        self,
        instances: Sequence[Any],
        new: list[Any],
        alias: str,
        returning: Sequence[Any],
        insert: Insert,
    ) -> list[Any]:
        """Insert ``instances``, and let the column's default generate the missing ids.

        Set the generated ids on the instances.

        :param new: the instances that have no id.
        :raises TimestampedIDMismatch: the generated ids contain the number of another shard.
        """
        default = ColumnDefault(Value(None), self)
        for row in new:
            setattr(row, self.attname, default)
        rows: list[Any] = []
        try:
            # Run the first insert of this process on the shard in a transaction. If the ids contain
            # the number of another shard, because the schema was copied from there, the transaction
            # is rolled back.
            with nullcontext() if alias in self._confirmed else all_or_nothing(alias):
                answers = insert([*returning, self])
                self._check_generated(instances, default, answers, alias)
            rows = answers
        finally:
            # Replace the DEFAULT on each instance by the generated id. ``rows`` has one item for
            # each instance, even if it had an id. If the insert has failed or ignores conflicts,
            # ``rows`` is empty, and the ids become None.
            for row, answer in zip_longest(instances, rows):
                if getattr(row, self.attname, None) is default:
                    setattr(row, self.attname, answer[-1] if answer else None)
        return [answer[:-1] for answer in rows]

    def _check_generated(
        self,
        instances: Sequence[Any],
        default: DatabaseDefault,
        answers: Sequence[Any],
        alias: str,
    ) -> None:
        """Raise an error if the column's default has generated ids with the number of another shard."""
        shard = shard_of(alias)
        if shard is None:
            return
        shift, bits = self.embedded_shard
        for row, answer in zip(instances, answers, strict=False):
            if getattr(row, self.attname) is not default:
                continue
            if answer[-1] >> shift & (1 << bits) - 1 != shard.number:
                parts = self.layout.unpack(answer[-1])
                raise TimestampedIDMismatch(
                    f"{self.model._meta.db_table!r} on {alias!r} made the id {answer[-1]!r}, which is"
                    f" {parts!r}: the schema was copied from another shard. 'manage.py migrate"
                    f" --database {alias}' gives its function the number {shard.number!r}."
                )
            self._confirmed.add(alias)
