"""Hide, create and show the tables of a shard while the shard moves to another node.

To *hide* a table is to rename it, and to store its real name in a table of names. Then no program
finds the table by its real name. So a program that does not know on which node the shard is now
gets an error, even if it does not use this library.

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

#: The name of the table with the real names of hidden (renamed) tables. If a schema has such a
#: table, its shard is moving, or has moved to another node.
NAMES: Final = f"{OWN_PREFIX}names"
_HIDDEN_PREFIX: Final = f"{OWN_PREFIX}hidden_"
#: The name of the fence of a shard that is moving. The shard has one such fence for all its tables.
#: While the fence is closed, triggers refuse writes to the tables.
FENCE: Final = "shard_move"


@dataclass(frozen=True)
class SchemaDefinition:
    """The SQL statements that create the tables of a schema, without rows.

    :param statements: maps the name of each table to the statements that create the table and its
        indexes. On PostgreSQL, it also maps the name of each sequence, function and type to its
        statements.
    :param defaults: SQL for the character set and collation of new tables; "" if there are none.
    """

    statements: Mapping[str, tuple[str, ...]]
    defaults: str = ""


class SchemaMove(OwnSession, ABC):
    """Creates, hides and shows the tables of one shard that moves to another node.

    To hide a table is to rename it, so that programs do not find it. To show a table is to give it
    its real name back. The tables are hidden on the new node until the shard has moved, and on the
    old node from then on.

    Each change is made under a lock, so that no other session of the library changes tables or
    triggers of the schema meanwhile.

    :param confirm: called under the lock, before each change. Raises an error if this process must
        not make the change, for example because another process has taken the move over.
    """

    #: Whether the database calls triggers for every change of a row, except for changes by foreign
    #: key actions such as CASCADE. If False, triggers can miss changes in any table, and a move
    #: must find these changes in another way.
    triggers_see_all: ClassVar[bool] = True

    def __init__(self, connection: Any, confirm: Callable[[], None]) -> None:
        super().__init__(connection)
        self._confirm = confirm

    # ##### Definitions of the schema #####

    def tables(self) -> list[CapturedTable]:
        """Return all tables with their primary keys. Views, and the tables that this library
        creates for its own operations, are left out.

        All these tables have the same fence (:attr:`CapturedTable.fence`). While it is closed,
        triggers refuse writes to all of them.
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
        """Return the SQL statements that create the schema. Hidden (renamed) tables have their real
        names in them.
        """

    @abstractmethod
    def layout(self) -> Mapping[str, tuple[str, ...]]:
        """Return a dict that maps the name of each table (or other object) to a definition that can
        be compared.

        Details that may differ between equal tables are left out. So a move can check whether the
        tables on two servers are equal, and whether the tables are the same before and after they
        were hidden.
        """

    @abstractmethod
    def identities(self) -> frozenset[str]:
        """Return one value for each table, which changes if TRUNCATE or ALTER TABLE gives the table
        new storage.

        The triggers that record changed rows are not called for these statements. So a move
        compares the values at its beginning with those at the switch. Hiding a table does not
        change its value.

        :raises django.db.OperationalError: the account has no right to see these values.
        """

    # ##### Hiding: other names for tables that must not be used #####

    @abstractmethod
    def build(self, definition: SchemaDefinition, tag: str) -> None:
        """Create hidden tables without rows. They have their hidden names from the beginning, so no
        other session ever sees them under their real names.

        Hidden tables that an earlier move has left are dropped.

        :param tag: a text in the hidden names that is different for each move. So a process whose
            move was ended cannot write to the tables of a later move.
        """

    @abstractmethod
    def hide(self, tables: Sequence[CapturedTable], tag: str, patience: float) -> float:
        """Hide the tables: rename all of them at the same moment. Can be repeated.

        :param tag: a text in the hidden names that is different for each move.
        :param patience: seconds to wait for transactions that use the tables.
        :return: the time (``time.monotonic()``) at which statements of other sessions began to wait
            for the renaming.
        :raises django.db.OperationalError: the transactions took longer than ``patience``. No table
            was renamed.
        """

    @abstractmethod
    def show(self, patience: float) -> None:
        """Show the hidden tables: give all of them their real names back at the same moment. Can be
        repeated.

        :raises MoveFailed: other tables have these names by now. No table was shown.
        :raises django.db.OperationalError: another session has worked on the schema for more than
            ``patience`` seconds.
        """

    def warm_up(self) -> None:
        """Prepare hidden tables for queries, for example by computing statistics. Call it before
        the tables are shown, so that the first queries are not slow.
        """
        return

    def finish(self) -> None:
        """Do the slow work that can wait until the tables are shown, such as checking foreign keys.
        Does not block other sessions.

        Can be repeated.

        :raises django.db.IntegrityError: a row refers to another row that does not exist.
        """
        return

    @abstractmethod
    def discard(self) -> None:
        """Drop the hidden tables with their rows. Then drop the schema if it is empty. Can be
        repeated.

        The side tables, in which earlier moves of keys have left copied rows, are dropped, too. On
        SQLite, the file stays, with the table :data:`NAMES` in it, because a process may still have
        the file open.
        """

    def _side_tables(self) -> list[str]:
        """Return the side tables, in which earlier moves of keys have left copied rows. Side tables do
        not move with the shard.
        """
        return [name for name in self._table_names() if name.startswith(SIDE_PREFIX)]

    def hidden(self) -> dict[str, str]:
        """Return a dict that maps the real name of each hidden table to its hidden name."""
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

        The dict maps the name of the table or sequence to the number. Hidden tables have their real
        names in it.
        """

    @abstractmethod
    def set_counters(self, counters: Mapping[str, int]) -> None:
        """Set the counters that generate ids (AUTO_INCREMENT or the like) of the hidden tables. So
        new ids continue after those of the old node.

        :param counters: what :meth:`counters` has returned on the old node.
        """


def hidden_name(table: str, tag: str) -> str:
    """Return the name that a table gets while it is hidden. It has at most 64 characters.

    :param table: the real name of the table.
    :param tag: a text in the hidden names that is different for each move.
    """
    digest = md5(table.encode(), usedforsecurity=False).hexdigest()
    return f"{_HIDDEN_PREFIX}{tag}_{digest[:16]}"


def as_hidden(table: CapturedTable, tag: str) -> CapturedTable:
    return replace(table, name=hidden_name(table.name, tag))
