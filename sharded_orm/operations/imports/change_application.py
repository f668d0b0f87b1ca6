"""Apply changes of an import's source to the shards, after the rows were copied.

The source is the database from which rows are imported. While the import copies, triggers on the
source record which rows the site changes.
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

# For each table: maps the primary key of a changed row to the anchors that the row had before its
# changes. The anchor of a row is its shard key, or the foreign key to the parent row that has the
# shard key (:attr:`SourceTable.anchor_field`). The old anchors lead to the shard that has the old
# copy of the row.
_Changed = dict[SourceTable, dict[Any, set[Any]]]


class ChangeApplication:
    """Applies changes of an import's source (the database with the unsharded rows) to the shards.

    The journal, a table on the source, records which rows have changed. A change may be applied
    twice without harm, for example if a process was killed after it had applied a part of the
    changes.

    :param tables: the imported tables. Each table comes after the tables to which it refers.
    :param check: called before work on each shard. It raises an error if this process must not
        continue, because another process has taken over.
    """

    def __init__(
        self, tables: Sequence[SourceTable], journal: SourceJournal, check: Callable[[], None]
    ) -> None:
        self._tables = tables
        self._journal = journal
        self._check = check

    def apply(self, changes: Iterable[Change], *, afresh: bool = False) -> None:
        """Bring each changed row of the import's source to its shard, with its present values. If
        the row does not exist on the source any more, delete it from its shard.

        If the shard key of a row has changed, the row moves to the shard of the new key. Rows that
        get their shard key from this row move with it.

        Costs two queries for each shard, table and 500 rows, in addition to the statements that
        write.

        :param changes: entries of the source's journal.
        :param afresh: True deletes a changed row from its shard and inserts it again; False updates
            it. Deleting first helps if two rows have exchanged unique values.
        :raises ImportConflict: a shard has a different row with the same primary key.
        :raises IntegrityError: a constraint of a shard refuses a row. It may accept the row when a
            second row has changed as well, but that change is not among ``changes``.
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

        Rows of other tables may get their shard key from one of these rows. If such a row moves to
        another shard, they must move with it. So this method adds them to ``changed``.
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
                # Skip an anchor that leads to no shard. (The anchor is the old shard key, or the
                # foreign key to the parent row that has the key.) Either no shard ever stored the
                # row, or the parent row was deleted from the source, too. In the second case,
                # ShardTable.remove() deletes the row together with its parent.
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
        """Return a dict that maps each of ``anchors`` to its shard key.

        The anchor of a row (:attr:`SourceTable.anchor_field`) is its shard key, or the foreign key
        to the parent row that has the shard key. An anchor is left out if the source has no parent
        row for it, or no shard key.
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
    """Return the anchors that changed rows had before and do not have now, keyed by primary key.

    The anchor of a row (:attr:`SourceTable.anchor_field`) is its shard key, or the foreign key to
    the parent row that has the shard key. If the anchor of a row has changed, the row may have to
    be deleted from the shard to which the old anchor leads.

    :param changed: the anchors that each row had before its changes, keyed by primary key.
    :param rows: the rows as they are on the source now, keyed by primary key.
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
