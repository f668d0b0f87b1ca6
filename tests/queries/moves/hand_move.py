"""A move of a key by hand, step by step: what the mover does, as far as readers and writers see it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any

from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.utils import timezone

from sharded_orm import runtime
from sharded_orm.backends.fence_messages import MARKER, SQLSTATE
from sharded_orm.models import KeyMove, Placement

SOURCE, TARGET = 3, 12


def alias(shard: int) -> str:
    return f"photos_{shard:05d}"


class HandMove:
    """The move of ``key`` from ``source`` to ``target``.

    :param tables: the tables of rows of the key, with the column of the key; referred tables first.
    """

    def __init__(
        self, key: int, tables: dict[str, str], source: int = SOURCE, target: int = TARGET
    ) -> None:
        self.key, self.tables, self.source, self.target = key, tables, source, target
        self.move: Any = None
        #: Automatic many-to-many tables that move along, with the condition of their rows.
        self.links: dict[str, str] = {}

    def announce(self) -> None:
        self.move = KeyMove.objects.create(
            group="photos",
            key=str(self.key),
            value=str(self.key),
            source=self.source,
            target=self.target,
            in_flight=True,
        )
        # This stands for the wait after the announcement: this process has asked since.
        runtime.placement_lease().renew()

    def switch(self) -> None:
        """Copy the rows, and switch the directory. The rows of the source are then taken away."""
        self.publish()
        self.switch_directory()
        self.set_aside()

    def publish(self) -> None:
        """Copy the rows. Both shards have them from now on, and the source owns them."""
        KeyMove.objects.filter(pk=self.move.pk).update(phase="switching")
        for table, condition in self._conditions().items():
            for row in self._execute(self.source, f"SELECT * FROM {table} WHERE {condition}"):
                marks = ", ".join(["%s"] * len(row))
                with connections[alias(self.target)].cursor() as cursor:
                    cursor.execute(f"INSERT INTO {table} VALUES ({marks})", row)

    def switch_directory(self) -> None:
        """Give the key to the target. Both shards have the rows."""
        with transaction.atomic("directory"):
            Placement.objects.filter(group="photos", key=str(self.key)).update(shard=self.target)
            KeyMove.objects.filter(pk=self.move.pk).update(
                phase="switched", switched_at=timezone.now()
            )

    def set_aside(self) -> None:
        """Take the rows of the source away."""
        for table, condition in reversed(self._conditions().items()):
            self._execute(self.source, f"DELETE FROM {table} WHERE {condition}")

    def _conditions(self) -> dict[str, str]:
        conditions = {table: f"{column} = %s" for table, column in self.tables.items()}
        return conditions | self.links

    def settle(self) -> None:
        KeyMove.objects.filter(pk=self.move.pk).update(phase="settled", in_flight=None)
        runtime.placement_lease().renew()

    def whole(self) -> None:
        self.announce()
        self.switch()
        self.settle()

    def _execute(self, shard: int, sql: str) -> list[Any]:
        with connections[alias(shard)].cursor() as cursor:
            cursor.execute(sql, [self.key])
            return list(cursor.fetchall()) if cursor.description else []


_EVENTS = ("INSERT", "UPDATE", "DELETE")


def refusal(connection: Any, message: str = MARKER) -> str:
    """Return the statement with which a trigger refuses a write."""
    return {
        "sqlite": f"SELECT RAISE(ABORT, '{message}')",
        "mysql": f"SIGNAL SQLSTATE '{SQLSTATE}' SET MESSAGE_TEXT = '{message}'",
        "postgresql": f"RAISE '{message}' USING ERRCODE = '{SQLSTATE}'",
    }[connection.vendor]


def close_fence(shard: int, table: str) -> None:
    """Make triggers that refuse every write to ``table`` on ``shard``."""
    connection = connections[alias(shard)]
    body = f"BEGIN {refusal(connection)}; END"
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute(
                "CREATE OR REPLACE FUNCTION fence_refuses() RETURNS trigger LANGUAGE plpgsql"
                f" AS $$ {body} $$"
            )
            body = "EXECUTE FUNCTION fence_refuses()"
        for event in _EVENTS:
            cursor.execute(
                f"CREATE TRIGGER fence_{table}_{event} BEFORE {event} ON {table} FOR EACH ROW {body}"
            )


def open_fence(shard: int, table: str, *events: str) -> None:
    """Drop the triggers of :func:`close_fence`; by default for all events."""
    connection = connections[alias(shard)]
    on_table = f" ON {table}" if connection.vendor == "postgresql" else ""
    with connection.cursor() as cursor:
        for event in events or _EVENTS:
            cursor.execute(f"DROP TRIGGER IF EXISTS fence_{table}_{event}{on_table}")


def elsewhere(run: Callable[[], object]) -> Callable[[], None]:
    """Return a function that calls ``run`` in another thread, by connections of its own."""

    def in_thread(errors: list[BaseException]) -> None:
        try:
            run()
        except BaseException as error:
            errors.append(error)
        finally:
            for name in (alias(SOURCE), alias(TARGET), "directory"):
                # The close() of Django's SQLite backend does not close databases in memory.
                BaseDatabaseWrapper.close(connections[name])

    def run_and_wait() -> None:
        errors: list[BaseException] = []
        thread = Thread(target=in_thread, args=(errors,))
        thread.start()
        thread.join()
        assert not errors, errors

    return run_and_wait


@contextmanager
def before_scatter_reads(shard: int, run: Callable[[], object]) -> Iterator[None]:
    """Within the block, call ``run`` before the first statement for several shards reaches ``shard``."""
    is_done = False
    is_file = connections[alias(shard)].vendor == "sqlite"

    def wrapper(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        nonlocal is_done
        own = context["connection"].alias == alias(shard) if is_file else alias(shard) in sql
        if own and not is_done:
            is_done = True
            # An open cursor of this thread locks a file against other threads.
            run() if is_file else elsewhere(run)()
        return execute(sql, params, many, context)

    with connections["photos"].execute_wrapper(wrapper):
        yield
    assert is_done


@contextmanager
def before_statement(shard: int, run: Callable[[], object]) -> Iterator[None]:
    """Within the block, call ``run`` before the first statement that is sent to ``shard``.

    The statement arrives afterwards, as one of a process that was paused in between.
    """
    is_done = False

    def wrapper(execute: Any, *args: Any) -> Any:
        nonlocal is_done
        if not is_done:
            is_done = True
            run()
        return execute(*args)

    with connections[alias(shard)].execute_wrapper(wrapper):
        yield
    assert is_done
