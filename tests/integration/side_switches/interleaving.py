"""What happens between two reads of a command. The functions run in a process of the site."""

from __future__ import annotations

import contextlib
import io
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import MySQLdb

from sharded_orm.backends.mysql.branches import name_of
from sharded_orm.backends.mysql.pair_side import MySQLPairSide
from sharded_orm.backends.mysql.row_copy import PASSES
from sharded_orm.backends.two_phase.branch import BranchName
from tests.patience import PATIENCE

#: The branch of a transaction in two phases that :func:`prepare_before_fence` prepares.
BRANCH = BranchName("orphan", "photos_00000")


def call_pairs(*arguments: str) -> str:
    """Run ``manage.py pairs …`` in this process. Return why it was refused; "" if it was not."""
    from django.core.management import call_command
    from django.core.management.base import CommandError

    errors = io.StringIO()
    try:
        call_command("pairs", *arguments, stdout=io.StringIO(), stderr=errors)
    except (CommandError, SystemExit) as exc:
        return f"{exc}{errors.getvalue()}"
    return ""


def before(name: str, node: str, action: Callable[[MySQLPairSide], None]) -> None:
    """Let ``action`` run before each call of the method ``name`` on the server of ``node``."""
    original = getattr(MySQLPairSide, name)

    def call(self: MySQLPairSide, *args: Any) -> Any:
        if self.name == node:
            action(self)
        return original(self, *args)

    setattr(MySQLPairSide, name, call)


def write_before_status(node: str, other: Mapping[str, Any]) -> None:
    """Before each ``status()`` of ``node``, the other server commits a row, and ``node`` executes it.

    :param other: the arguments of a connection to the other server.
    """
    numbers = itertools.count(1)

    def write(replica: MySQLPairSide) -> None:
        connection = MySQLdb.connect(**other, autocommit=True)
        with contextlib.closing(connection), connection.cursor() as cursor:
            cursor.execute(
                "INSERT INTO photos_00000.entries_entry VALUES (%s, 0)", (next(numbers),)
            )
            cursor.execute("SELECT @@gtid_binlog_pos")
            ((position,),) = cursor.fetchall()
        assert replica.wait_for(position, PATIENCE)

    before("status", node, write)


def lock_until_wait(node: str, server: Mapping[str, Any]) -> None:
    """Let ``node`` change no table of shard 0 until this process waits for it.

    :param server: the arguments of a connection to the server of ``node``.
    """
    connection = MySQLdb.connect(**server)
    connection.query("SELECT * FROM photos_00000.entries_entry")
    connection.store_result()
    before("wait_for", node, lambda _: connection.commit())


def alter_before_columns(node: str, server: Mapping[str, Any]) -> None:
    """Add a column to a table of shard 0 before its columns are read on ``node`` for the first time.

    :param server: the arguments of a connection to the server of ``node``.
    """
    connection = MySQLdb.connect(**server)
    alter = iter(["ALTER TABLE photos_00000.entries_entry ADD note INT"])

    def change(_: MySQLPairSide) -> None:
        for sql in alter:
            connection.query(sql)

    before("columns", node, change)


def prepare_before_fence(node: str, server: Mapping[str, Any]) -> None:
    """Prepare a branch of a transaction in two phases on ``node`` before its server is closed.

    :param server: the arguments of a connection to the server of ``node``.
    """

    def prepare(_: MySQLPairSide) -> None:
        name = name_of(BRANCH).decode()
        with contextlib.closing(MySQLdb.connect(**server)) as connection:
            for sql in (
                # Fences let such a session pass.
                f"SET sql_log_bin = 0, {PASSES} = 1",
                f"XA START {name}",
                "INSERT INTO photos_00000.entries_entry VALUES (8, 0)",
                f"XA END {name}",
                f"XA PREPARE {name}",
            ):
                connection.query(sql)

    before("fence", node, prepare)
