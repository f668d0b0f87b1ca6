"""Hide, create and show the tables of a shard's schema while the schema moves to another node.

To *hide* a table is to rename it; a table of names stores its real name. So no program uses it by
accident, even if the program does not use this library, or does not know the schema's new node yet.

Each backend derives a class from :class:`SchemaMove`. ``connection.schema_move()`` returns an
object of that class, which has a session of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import md5
from typing import Any, ClassVar, Final

from sharded_orm.backends.change_capture import FENCES, CapturedTable
from sharded_orm.backends.own_session import OwnSession
from sharded_orm.backends.row_copy import SIDE_PREFIX
from sharded_orm.backends.snapshot import OWN_PREFIX
from sharded_orm.exceptions import MoveFailed

#: The table with the real names of hidden (renamed) tables. If a schema has this table, its shard is
#: moving, or has moved to another node.
NAMES: Final = f"{OWN_PREFIX}names"
_HIDDEN_PREFIX: Final = f"{OWN_PREFIX}hidden_"
#: The name of the one fence to which all tables of a moving schema belong. While it is closed,
#: triggers refuse changes of the tables.
FENCE: Final = "shard_move"


@dataclass(frozen=True)
class SchemaDefinition:
    """The definition of a schema, without rows.

    :param statements: name of each table -> the statements that create the table and its indexes.
        On PostgreSQL, it also has the statements that create each sequence, function and type.
    :param defaults: SQL for the character set and collation of new tables; "" if there are none.
    """

    statements: Mapping[str, tuple[str, ...]]
    defaults: str = ""


class SchemaMove(OwnSession, ABC):
    """Creates and renames the tables of one shard that moves to another node.

    To hide a table is to rename it, so that programs do not find it. Tables are hidden on the new
    node before the move, and on the old node after it. To show a table is to give it its real name.

    Each change is made under a lock that keeps other sessions of the library from changing tables
    or triggers of the schema.

    :param confirm: called under the lock, before each change. Raises an error if this process must
        not make the change.
    """

    #: Whether triggers see every change of a row, except for changes by foreign key actions such as
    #: CASCADE.
    triggers_see_all: ClassVar[bool] = True

    def __init__(self, connection: Any, confirm: Callable[[], None]) -> None:
        super().__init__(connection)
        self._confirm = confirm

    # ##### Definitions of the schema #####

    def tables(self) -> list[CapturedTable]:
        """Return all tables with their primary keys, except those of this library's own operations.

        All rows of the tables have the same fence (:attr:`CapturedTable.fence`): while it is closed,
        triggers refuse changes of the rows. Views are not included.
        """
        return [
            CapturedTable(name, self._primary_key(name), "", fence=FENCE)
            for name in self._table_names()
            if not name.startswith(OWN_PREFIX)
        ]

    def obstacles(self) -> list[str]:
        """Return the reasons why the schema cannot be moved, as sentences; empty if it can."""
        problems = list(self._obstacles())
        if FENCES in self._table_names():
            problems.append(
                "fences of moved keys are left on it: 'manage.py keys repair' removes them as soon as"
                " no session of before these moves is open"
            )
        for table in self.tables():
            if not table.pks:
                problems.append(
                    f"the table {table.name!r} has no primary key, so changes of its rows cannot be"
                    " followed: give it one"
                )
        return problems

    @abstractmethod
    def _obstacles(self) -> Iterator[str]: ...

    @abstractmethod
    def _table_names(self) -> list[str]: ...

    @abstractmethod
    def _primary_key(self, table: str) -> tuple[str, ...]: ...

    @abstractmethod
    def definition(self) -> SchemaDefinition:
        """Return the definition of the schema. Tables that are hidden have their real names in it."""

    @abstractmethod
    def layout(self) -> Mapping[str, tuple[str, ...]]:
        """Return a comparable definition of each table (or other object), by name.

        The definition leaves out details that may differ between equal tables. So layouts can be
        compared between two servers, or before and after the tables were hidden.
        """

    @abstractmethod
    def identities(self) -> frozenset[str]:
        """Return a value for each table that changes if the table gets new storage, by TRUNCATE or
        by ALTER TABLE. Hiding a table does not change its value.

        :raises django.db.OperationalError: the account may not see these values.
        """

    # ##### Hiding: other names for tables that must not be used #####

    @abstractmethod
    def build(self, definition: SchemaDefinition, tag: str) -> None:
        """Create hidden tables without rows. Drop the hidden tables that an earlier move has left.

        No other session ever sees the new tables under their real names.

        :param tag: a part of the hidden names that no other move uses. So a process whose move has been
            ended cannot write to the tables of a later move.
        """

    @abstractmethod
    def hide(self, tables: Sequence[CapturedTable], tag: str, patience: float) -> float:
        """Rename the tables to hidden names, all at the same moment. Can be repeated.

        :param tag: a part of the hidden names, as in :meth:`build`.
        :param patience: seconds to wait for transactions that use the tables.
        :return: the time (``time.monotonic()``) from which statements of other sessions had to wait.
        :raises django.db.OperationalError: the transactions took longer than ``patience``. No table
            was renamed.
        """

    @abstractmethod
    def show(self, patience: float) -> None:
        """Rename the hidden tables back to their real names, all at the same moment. Can be repeated.

        :raises MoveFailed: other tables have these names. No table was shown.
        :raises django.db.OperationalError: another session works on the schema for more than
            ``patience`` seconds.
        """

    def warm_up(self) -> None:
        """Prepare hidden (renamed) tables, for example by statistics, so that the first queries are
        not slow. Must be called before the tables are shown.
        """
        return

    def finish(self) -> None:
        """Do the slow work that is left after the tables were shown. Does not block other sessions.

        Can be repeated.

        :raises django.db.IntegrityError: a row refers to another row that does not exist.
        """
        return

    @abstractmethod
    def discard(self) -> None:
        """Drop the hidden (renamed) tables with their rows, and the schema if it is empty then. Can be
        repeated.

        This also drops the old rows of moved keys that the schema still keeps. On SQLite, the file is
        kept, with the table :data:`NAMES` in it, because a process may have the file open.
        """

    def _side_tables(self) -> list[str]:
        """Return the side tables, in which earlier moves of keys have left copied rows. Side tables do
        not move with the shard.
        """
        return [name for name in self._table_names() if name.startswith(SIDE_PREFIX)]

    def hidden(self) -> dict[str, str]:
        """Return the tables that are hidden under other names, as real name -> hidden name."""
        present = set(self._table_names())
        if NAMES not in present:
            return {}
        rows = self._rows(f"SELECT name, hidden FROM {self._quote(NAMES)}")
        return {str(name): str(hidden) for name, hidden in rows if hidden in present}

    def _refuse_names_in_use(self, hidden: Mapping[str, str]) -> None:
        taken = sorted(set(hidden) & set(self._table_names()))
        if taken:
            raise MoveFailed(
                f"The tables of {self._connection.alias!r} are hidden, and cannot be shown because"
                f" somebody has created other ones of their names ({', '.join(taken)}). Drop or rename"
                " these, and run 'manage.py shards move GROUP --repair'."
            )

    @abstractmethod
    def counters(self) -> dict[str, int]:
        """Return the next number (SQLite: the last number) of each counter that generates ids.

        The numbers are keyed by the name of the table or sequence. Hidden tables have their real names
        in the result.
        """

    @abstractmethod
    def set_counters(self, counters: Mapping[str, int]) -> None:
        """Set the id counters (AUTO_INCREMENT or the like) of hidden tables, so that the next ids
        follow those of another schema.

        :param counters: the result of the other schema's :meth:`counters`.
        """


def hidden_name(table: str, tag: str) -> str:
    """Return the name under which a table is hidden. It has at most 64 characters.

    :param table: the real name of the table.
    :param tag: a part of the hidden names that no other move uses.
    """
    digest = md5(table.encode(), usedforsecurity=False).hexdigest()
    return f"{_HIDDEN_PREFIX}{tag}_{digest[:16]}"


def as_hidden(table: CapturedTable, tag: str) -> CapturedTable:
    """Return a copy of ``table`` with the name under which the table is hidden."""
    return replace(table, name=hidden_name(table.name, tag))
