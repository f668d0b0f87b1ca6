"""A bank with an account on each of a few shards. Money moves between them, and none is made or lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import sharded_orm
from sharded_orm import runtime
from sharded_orm.backends.two_phase.branch import BranchName
from sharded_orm.topology.model import Topology
from sharded_orm.two_phase import recovery
from tests.unit.backends.group.conftest import GROUP, Shards

#: Shards 0 and 1 are on the first node, 8 and 9 on the second.
NUMBERS = (0, 1, 8, 9)
START = 1000


class Bank(Shards):
    """Accounts with :data:`START` each."""

    def __init__(self, topology: Topology, decision: Any) -> None:
        super().__init__(topology)
        self._decision = decision

    def open(self) -> None:
        for number in NUMBERS:
            wrapper = self[number]
            wrapper.create_shard_database()
            with wrapper.cursor() as cursor:
                cursor.execute("CREATE TABLE account (id integer PRIMARY KEY, balance integer)")
                cursor.execute("INSERT INTO account VALUES (1, %s)", [START])
            with wrapper.schema_editor() as editor:
                editor.create_model(self._decision)

    def drop(self) -> None:
        recovery.recover(self.model, grace=0)
        for number in NUMBERS:
            self[number].drop_shard_database()

    @property
    def model(self) -> Any:
        return runtime.group(GROUP)

    def add(self, number: int, value: int) -> None:
        with self[number].cursor() as cursor:
            cursor.execute("UPDATE account SET balance = balance + %s WHERE id = 1", [value])

    def transfer(self, *numbers: int, amount: int = 1) -> None:
        """Take money from all accounts but the first, and give it to the first."""
        with sharded_orm.atomic(GROUP, two_phase=True):
            self.add(numbers[0], amount * (len(numbers) - 1))
            for number in numbers[1:]:
                self.add(number, -amount)

    def balances(self) -> list[int]:
        return [self.balance(number) for number in NUMBERS]

    def balance(self, number: int) -> int:
        """Return the committed balance, as another connection sees it."""
        wrapper = self[number].copy()
        try:
            with wrapper.cursor() as cursor:
                cursor.execute("SELECT balance FROM account")
                return int(cursor.fetchone()[0])
        finally:
            wrapper.close()

    def prepared(self) -> list[BranchName]:
        """Return the branches on both servers."""
        return [branch for number in (0, 8) for branch in self[number].prepared_branches()]

    def decisions(self, number: int) -> list[str]:
        with self[number].cursor() as cursor:
            cursor.execute("SELECT name FROM sharded_orm_decision")
            return [name for (name,) in cursor.fetchall()]

    def close(self) -> None:
        self.group.close()


def in_child(work: Callable[[], object]) -> int:
    """Run ``work`` in a forked process, and return its exit status: 0, or minus the signal's number."""
    return os.waitstatus_to_exitcode(os.waitpid(start(work), 0)[1])


def start(work: Callable[[], object]) -> int:
    """Begin to run ``work`` in a forked process, and return its id."""
    pid = os.fork()
    if not pid:
        status = 1
        try:
            work()
            status = 0
        except BaseException as exc:
            os.write(2, f"child: {exc!r}\n".encode())
        finally:
            os._exit(status)
    return pid


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
