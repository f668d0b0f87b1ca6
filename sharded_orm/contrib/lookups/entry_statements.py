"""The SQL statements that read and write entries of lookups.

The text of a statement depends on the kind of database and the number of rows.
"""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar

from django.db.models.constants import OnConflict

#: The columns of an entry, in the order in which all statements name them.
COLUMNS = ("lookup", "value", "slot", "key", "token", "is_open", "writer", "written_at")


class EntryStatements:
    """The SQL statements on entries for one kind of database.

    The statements are composed as text, because the ORM takes longer to compile them than the
    database to run them.

    :param ops: the operations of a connection object of Django.
    :param table: the name of the table.
    """

    _by_kind: ClassVar[dict[tuple[type, str], EntryStatements]] = {}

    def __init__(self, ops: Any, table: str) -> None:
        quoted = {name: ops.quote_name(name) for name in (*COLUMNS, "id")}
        self._id, self._quoted = quoted.pop("id"), quoted
        self._table = ops.quote_name(table)
        self._columns = ", ".join(quoted.values())
        self._row = " AND ".join(f"{quoted[name]} = %s" for name in COLUMNS[:3])
        # To see whether an entry has changed, compare the time as well as the token. A transaction
        # that is open for long renews its entries, which changes the time but not the token.
        self._unchanged = f"{self._row} AND {quoted['token']} = %s AND {quoted['written_at']} = %s"
        self._insert = (
            ops.insert_statement(on_conflict=OnConflict.IGNORE),
            ops.on_conflict_suffix_sql((), OnConflict.IGNORE, (), ()),
        )

    @classmethod
    def of(cls, ops: Any, table: str) -> EntryStatements:
        kind = type(ops), table
        statements = cls._by_kind.get(kind)
        if statements is None:
            statements = cls._by_kind[kind] = cls(ops, table)
        return statements

    @cache  # noqa: B019  # there is one instance per kind of database and table
    def insert(self, count: int) -> str:
        verb, rest = self._insert
        rows = ", ".join([_list(len(COLUMNS))] * count)
        return f"{verb} {self._table} ({self._columns}) VALUES {rows} {rest}"

    def take(self, has_former: bool) -> str:
        written = self._written("key", "token", "is_open", "writer", "written_at")
        where = self._unchanged if has_former else self._row
        return f"UPDATE {self._table} SET {written} WHERE {where}"

    def mark(self, count: int) -> str:
        written = self._written("token", "is_open", "writer", "written_at")
        return f"UPDATE {self._table} SET {written} WHERE {self._places(count)}"

    def remove_places(self, count: int) -> str:
        token = self._quoted["token"]
        return f"DELETE FROM {self._table} WHERE {token} = %s AND {self._places(count)}"

    def remove(self, count: int) -> str:
        return f"DELETE FROM {self._table} WHERE {self._quoted['token']} IN {_list(count)}"

    def close(self, count: int) -> str:
        tokens = f"{self._quoted['token']} IN {_list(count)}"
        return f"UPDATE {self._table} SET {self._written('is_open')} WHERE {tokens}"

    def renew(self, count: int) -> str:
        tokens = f"{self._quoted['token']} IN {_list(count)}"
        return f"UPDATE {self._table} SET {self._written('written_at')} WHERE {tokens}"

    def at_place(self) -> str:
        return self._select(self._columns, self._row)

    def of_tokens(self, count: int) -> str:
        return self._select(self._columns, f"{self._quoted['token']} IN {_list(count)}")

    def of_values(self, count: int) -> str:
        return self._select(self._columns, self._of_values(count))

    @cache  # noqa: B019  # there is one instance per kind of database and table
    def keys_of_values(self, count: int) -> str:
        return self._select(f"DISTINCT {self._quoted['key']}", self._of_values(count))

    @cache  # noqa: B019  # there is one instance per kind of database and table
    def some_keys_of_value(self, limit: int) -> str:
        return f"{self._select(self._quoted['key'], self._of_values(1))} LIMIT {int(limit)}"

    def after(self, limit: int) -> str:
        where = f"{self._quoted['lookup']} = %s AND {self._id} > %s"
        select = self._select(f"{self._id}, {self._columns}", where)
        return f"{select} ORDER BY {self._id} LIMIT {int(limit)}"

    def count(self) -> str:
        return self._select("COUNT(*)", f"{self._quoted['lookup']} = %s")

    def remove_entry(self) -> str:
        return f"DELETE FROM {self._table} WHERE {self._unchanged}"

    def remove_lookup(self) -> str:
        return f"DELETE FROM {self._table} WHERE {self._quoted['lookup']} = %s"

    def _select(self, what: str, where: str) -> str:
        return f"SELECT {what} FROM {self._table} WHERE {where}"

    def _of_values(self, count: int) -> str:
        return f"{self._quoted['lookup']} = %s AND {self._quoted['value']} IN {_list(count)}"

    def _places(self, count: int) -> str:
        pair = f"({self._quoted['value']} = %s AND {self._quoted['slot']} = %s)"
        return f"{self._quoted['lookup']} = %s AND ({' OR '.join([pair] * count)})"

    def _written(self, *names: str) -> str:
        return ", ".join(f"{self._quoted[name]} = %s" for name in names)


def _list(count: int) -> str:
    return f"({', '.join(['%s'] * count)})"
