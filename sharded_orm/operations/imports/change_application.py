"""Apply to the shards the changes that were recorded on the source of an import.

The source is the database from which rows are imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from django.db import connections

from sharded_orm import runtime
from sharded_orm.backends.change_capture import Change
from sharded_orm.models.cached.cached_model import cached_model
from sharded_orm.models.cached.model_cache import void_shards
from sharded_orm.operations.imports.row_shards import rows_by_alias
from sharded_orm.operations.imports.row_storage import ShardTable, Stored
from sharded_orm.operations.imports.source_journal import SourceJournal
from sharded_orm.operations.imports.source_tables import LOOK_UPS, SourceRow, SourceTable
from sharded_orm.operations.relations import batched

# For each table, the anchors that each changed row had before its changes, by primary key. An
# anchor is the shard key of a row, or the foreign key from which the row gets its shard key
# (:attr:`SourceTable.anchor_field`).
_Changed = dict[SourceTable, dict[Any, set[Any]]]


class ChangeApplication:
    """Writes the changes in the journal to the shards. The journal is a table on the import's source.

    Each entry of the journal reports that a row of an imported table has changed. The same changes
    may be applied again, even if only a part of them was applied before.

    :param tables: the imported tables. Each table comes after the tables to which it refers.
    :param check: called before work on each shard. It raises an error if this process must not
        continue.
    """

    def __init__(
        self, tables: Sequence[SourceTable], journal: SourceJournal, check: Callable[[], None]
    ) -> None:
        self._tables = tables
        self._journal = journal
        self._check = check

    def apply(self, changes: Iterable[Change], *, afresh: bool = False) -> None:
        """Store the changed rows of the import's source on the shards, as they are on the source
        now.

        If the shard key of a row changed, the rows that get their key from it move, too.

        Costs two queries for each shard, table and 500 rows, in addition to the statements that
        write.

        :param changes: entries of the source's journal.
        :param afresh: whether rows that exist on both sides are deleted from the shard and inserted
            again. This helps if rows have exchanged unique values.
        :raises ImportConflict: a shard has a different row with the same primary key.
        :raises IntegrityError: a constraint of a shard refuses a row, perhaps because a second row
            has changed as well.
        """
        changed = self._changed(changes)
        rows = {table: self._read(table, changed) for table in self._tables}
        written: dict[SourceTable, set[str]] = {}
        try:
            for table in reversed(self._tables):
                there = {} if afresh else rows[table]
                self._remove(table, _gone(table, changed[table], there), written)
            for table in self._tables:
                self._store(table, list(rows[table].values()), written)
        finally:
            for table, aliases in written.items():
                cached = cached_model(table.model)
                if cached is not None:
                    void_shards(cached, sorted(aliases))

    def _changed(self, changes: Iterable[Change]) -> _Changed:
        changed: _Changed = {table: {} for table in self._tables}
        for change in changes:
            table = self._journal.table_of(change)
            if table is not None:
                pk, anchor = self._journal.row_of(table, change)
                changed[table].setdefault(pk, set()).add(anchor)
        return changed

    def _read(self, table: SourceTable, changed: _Changed) -> dict[Any, SourceRow]:
        """Return the changed rows of ``table`` as they are on the source now, keyed by primary key.

        A row of another table may get its shard key from one of these rows. Such rows are added to
        ``changed``.
        """
        rows: dict[Any, SourceRow] = {}
        for batch in batched(changed[table], LOOK_UPS):
            rows.update((row.pk, row) for row in table.read(table.query().filter(pk__in=batch)))
        for dependent in self._dependents(table):
            for pk in dependent.linked_pks(table.alias, table, rows):
                changed[dependent].setdefault(pk, set())
        return rows

    def _dependents(self, table: SourceTable) -> list[SourceTable]:
        """Return the tables whose rows get their shard key from a row of ``table``."""
        return [
            other
            for other in self._tables
            if other.key_link is not None and other.key_link.related_model is table.model
        ]

    def _remove(
        self,
        table: SourceTable,
        gone: Mapping[Any, set[Any]],
        written: dict[SourceTable, set[str]],
    ) -> None:
        by_alias: dict[str, dict[Any, set[Any]]] = {}
        keys = self._keys(table, {anchor for anchors in gone.values() for anchor in anchors})
        for pk, anchors in gone.items():
            for anchor in anchors:
                # Skip this row if no shard is found for its anchor (its shard key, or the foreign
                # key to the parent row with the key). Either no shard has the row, or its parent
                # row was deleted from the source, too, and takes the row with it.
                shard = (
                    runtime.locate(table.options.group, keys[anchor]) if anchor in keys else None
                )
                if shard is not None:
                    by_alias.setdefault(shard.alias, {}).setdefault(pk, set()).add(anchor)
        for alias, anchors_there in sorted(by_alias.items()):
            with _Shard(alias, self._check):
                for other in (table, *self._tables_behind(table)):
                    written.setdefault(other, set()).add(alias)
                ShardTable(table, alias, update=True).remove(anchors_there, self._tables)

    def _tables_behind(self, table: SourceTable) -> list[SourceTable]:
        dependents = self._dependents(table)
        return [*dependents, *(far for near in dependents for far in self._tables_behind(near))]

    def _keys(self, table: SourceTable, anchors: set[Any]) -> dict[Any, Any]:
        """Return a dict from each of ``anchors`` to its shard key.

        The anchor of a row (:attr:`SourceTable.anchor_field`) is its shard key, or the foreign key
        to the parent row with the key. Anchors for which the source has no key are left out.
        """
        anchors = anchors - {None}
        link = table.key_link
        if link is None:
            return {anchor: anchor for anchor in anchors}
        related = SourceTable(link.related_model, table.alias)
        keys = {}
        for batch in batched(anchors, LOOK_UPS):
            name = link.target_field.attname
            parents = related.query().filter(**{f"{name}__in": batch})
            for anchor, key in parents.values_list(name, related.key_path):
                if key is not None:
                    keys[link.get_prep_value(anchor)] = related.key_field.get_prep_value(key)
        return keys

    def _store(
        self, table: SourceTable, rows: list[SourceRow], written: dict[SourceTable, set[str]]
    ) -> None:
        for alias, rows_there in sorted(rows_by_alias(table, rows).items()) if rows else ():
            with _Shard(alias, self._check):
                written.setdefault(table, set()).add(alias)
                ShardTable(table, alias, update=True).store(rows_there, Stored())


def _gone(
    table: SourceTable, changed: Mapping[Any, set[Any]], rows: Mapping[Any, SourceRow]
) -> dict[Any, set[Any]]:
    """Return the anchors that rows had before and do not have now, keyed by primary key.

    The anchor of a row (:attr:`SourceTable.anchor_field`) is its shard key, or the foreign key to
    the parent row with the key.

    :param changed: the anchors that each row had before, keyed by primary key.
    :param rows: the rows as they are now, keyed by primary key.
    """
    names = [column.name for column in table.columns]
    place = names.index(table.anchor_field.attname)
    gone = {}
    for pk, anchors in changed.items():
        row = rows.get(pk)
        now = set() if row is None else {table.anchor_field.get_prep_value(row.values[place])}
        if anchors - now:
            gone[pk] = anchors - now
    return gone


class _Shard:
    """A context manager for work on one shard, which closes the shard's connection at the end.

    :param check: called at once. It raises an error if this process must not continue.
    """

    def __init__(self, alias: str, check: Callable[[], None]) -> None:
        self._alias = alias
        check()

    def __enter__(self) -> None:
        return

    def __exit__(self, *exc_info: object) -> None:
        connection: Any = connections[self._alias]
        connection.close_and_forget()
