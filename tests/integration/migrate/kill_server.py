"""Runs commands in processes that are killed at a chosen moment.

This is a process of its own, started in the folder of a project. It sets Django up once and forks
for each command, so that hundreds of kills are affordable; the killed processes are real ones
nevertheless. Requests and answers are lines of JSON.

A moment is an *event*: a statement that changes something (in a shard, in a copy of one, in
the global database), or a commit. Work between two events leaves nothing behind, so a kill before
each event covers a kill after each event as well.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import django
from django.core.management import ManagementUtility, load_command_class
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.utils import CursorWrapper
from django.db.migrations.loader import MigrationLoader

from tests.garbage import keep_all

_READS = ("SELECT", "SHOW", "PRAGMA", "EXPLAIN", "SET", "SAVEPOINT", "RELEASE")
_SIGNS = "sharded_orm run"  # the thread that gives signs of life, at any time


@dataclass(frozen=True)
class Moment:
    """An event before which a process is killed.

    :param number: number of the event; -1 for none.
    :param only_shards: count only events on shards.
    :param parts: count only from an event whose text contains all of these.
    :param nth: which of those events to start from.
    """

    number: int = -1
    only_shards: bool = False
    parts: Sequence[str] = ()
    nth: int = 1


class Events:
    """Counts events, writes them to a file, and kills the process at the moment."""

    def __init__(self, moment: Moment, path: str) -> None:
        self._moment = moment
        self._left = moment.nth if moment.parts else 0
        self._count = 0
        self._lock = threading.Lock()
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)

    def __call__(self, where: str, what: str) -> None:
        if threading.current_thread().name.startswith(_SIGNS):
            return
        event = f"{where} {' '.join(what.split())}"
        with self._lock:
            os.write(self._file, f"{event}\n".encode())
            if self._moment.only_shards and not where.startswith("shop_"):
                return
            if self._left and all(part in event for part in self._moment.parts):
                self._left -= 1
            if self._left:
                return
            if self._count == self._moment.number:
                os.kill(os.getpid(), signal.SIGKILL)
            self._count += 1

    def statement(self, connection: Any, sql: Any) -> None:
        if not str(sql).lstrip().upper().startswith(_READS):
            self(_place(connection), str(sql))


def _place(connection: Any) -> str:
    settings = connection.settings_dict
    name = str(settings.get("SCHEMA") or settings["NAME"])
    is_copy = name.endswith("_rehearsal") or name == ":memory:"
    return "copy" if is_copy else str(connection.alias)


def listen(events: Events) -> None:
    """Report all statements of this process to ``events``."""
    execute, many = CursorWrapper._execute, CursorWrapper._executemany
    commit = BaseDatabaseWrapper._commit

    def _execute(self: Any, sql: Any, *arguments: Any) -> Any:
        events.statement(self.db, sql)
        return execute(self, sql, *arguments)

    def _executemany(self: Any, sql: Any, *arguments: Any) -> Any:
        events.statement(self.db, sql)
        return many(self, sql, *arguments)

    def _commit(self: Any) -> Any:
        if self.connection is not None:
            events(_place(self), "COMMIT")
        return commit(self)

    CursorWrapper._execute = _execute  # type: ignore[method-assign]
    CursorWrapper._executemany = _executemany  # type: ignore[method-assign]
    BaseDatabaseWrapper._commit = _commit  # type: ignore[method-assign]
    _listen_on_mysql(events)
    _listen_on_postgresql(events)


def _listen_on_mysql(events: Events) -> None:
    """Report statements without a cursor: of schemas, and of several tables in one packet."""
    try:
        from sharded_orm.backends.mysql import snapshot
        from sharded_orm.backends.mysql.session import NodeSession
    except ImportError:
        return
    rows_in, create, drop = NodeSession.rows_in, snapshot.create_schema, snapshot.drop_schema

    def one_by_one(self: Any, schema: str, *statements: str) -> Any:
        if not any("IF NOT EXISTS" in statement for statement in statements):
            return rows_in(self, schema, *statements)
        # The server may be killed, or a packet may end, between them.
        where = "copy" if schema.endswith("_rehearsal") else schema[schema.index("shop_") :]
        rows = []
        for statement in statements:
            if not statement.startswith(_READS):
                events(where, statement)
            rows += rows_in(self, schema, statement)
        return rows

    def recorded_create(*arguments: Any) -> None:
        events("copy", "MAKE")
        create(*arguments)

    def recorded_drop(*arguments: Any) -> None:
        events("copy", "DROP")
        drop(*arguments)

    NodeSession.rows_in = one_by_one  # type: ignore[method-assign]
    snapshot.create_schema, snapshot.drop_schema = recorded_create, recorded_drop


def _listen_on_postgresql(events: Events) -> None:
    """Report statements without a cursor of Django's: what is about whole schemas."""
    try:
        from sharded_orm.backends.postgresql.base import DatabaseWrapper
    except ImportError:
        return

    def report(name: str) -> None:
        method = getattr(DatabaseWrapper, name)

        def reported(self: Any, *arguments: Any) -> Any:
            events(_place(self), name)
            return method(self, *arguments)

        setattr(DatabaseWrapper, name, reported)

    # A schema is built in one transaction. The copy is dropped, and made anew, before its definitions are.
    for name in ("create_shard_database", "build_schema", "structural_copy"):
        report(name)


# ##### Weaker engines, which the tests must detect #####


def _no_position() -> None:
    """The engine runs statements of scripts without recording a checkpoint."""
    from sharded_orm.operations.migrate.checkpoint import What
    from sharded_orm.operations.migrate.shard_session import ShardSession

    begin = ShardSession.begin

    def silent(self: Any, checkpoint: Any, label: str) -> None:
        if checkpoint.what is What.STATEMENT:
            self.checkpoint = checkpoint
        else:
            begin(self, checkpoint, label)

    ShardSession.begin = silent  # type: ignore[method-assign]


def _position_too_late() -> None:
    """The engine records a checkpoint only after the statement."""
    from sharded_orm.operations.migrate.checkpoint import What
    from sharded_orm.operations.migrate.shard_session import ShardSession

    begin, attempt = ShardSession.begin, ShardSession.attempt
    kept: dict[int, tuple[Any, str]] = {}

    def later(self: Any, checkpoint: Any, label: str) -> None:
        if checkpoint.what is What.STATEMENT:
            kept[id(self)] = checkpoint, label
            self.checkpoint = checkpoint
        else:
            begin(self, checkpoint, label)

    @contextmanager
    def done(self: Any, *label: str) -> Any:
        with attempt(self, *label):
            yield
        if delayed := kept.pop(id(self), None):
            begin(self, *delayed)

    ShardSession.begin, ShardSession.attempt = later, done  # type: ignore[method-assign]


def _whole_stretches() -> None:
    """The engine assumes that the statements of a checkpoint are all done or not at all."""
    from sharded_orm.operations.migrate.step_outcome import RecoveryCheck

    statements = RecoveryCheck.statements

    def whole(self: Any, checkpoint: Any, script: Any) -> int:
        return checkpoint.count if statements(self, checkpoint, script) else 0

    RecoveryCheck.statements = whole  # type: ignore[method-assign]


def _no_marker() -> None:
    """The engine leaves no marker on the shard of a committed transaction."""
    from sharded_orm.operations.migrate.migration_records import Records

    Records.mark = lambda self, name: None  # type: ignore[method-assign]


def _marker_alone() -> None:
    """The engine commits the marker before the work that it marks."""
    from sharded_orm.operations.migrate.migration_records import Records

    mark = Records.mark

    def alone(self: Any, name: str) -> None:
        mark(self, name)
        connections[self._alias]._commit()  # type: ignore[attr-defined]  # not in the stubs

    Records.mark = alone  # type: ignore[method-assign]


def _no_lock() -> None:
    """The engine does not wait for a statement that is still running in the server."""
    from sharded_orm import runtime
    from sharded_orm.backends.group.member import ShardConnectionMixin

    connection: Any = connections[runtime.group("shop").shard(0).alias]
    assert isinstance(connection, ShardConnectionMixin)
    type(connection).lock_schema = lambda self, seconds: True  # type: ignore[method-assign]


def _never_unclear() -> None:
    """The engine repeats a statement if it cannot know whether it was done."""
    from sharded_orm.operations.exceptions import OperationUnclear
    from sharded_orm.operations.migrate.step_outcome import RecoveryCheck

    def guess(check: Callable[..., bool]) -> Callable[..., bool]:
        def guessed(*arguments: Any) -> bool:
            try:
                return check(*arguments)
            except OperationUnclear:
                return False

        return guessed

    for name in ("statements", "raw", "operation"):
        setattr(RecoveryCheck, name, guess(getattr(RecoveryCheck, name)))


def _from_the_beginning() -> None:
    """The engine starts an interrupted migration anew, as a loop over the shards does."""
    from sharded_orm.operations.migrate.executor import ScriptExecutor

    ScriptExecutor._resume = lambda self: (0, 0)  # type: ignore[method-assign]


ABLATIONS: dict[str, Callable[[], None]] = {
    "no position": _no_position,
    "position too late": _position_too_late,
    "whole stretches": _whole_stretches,
    "no marker": _no_marker,
    "marker alone": _marker_alone,
    "no lock": _no_lock,
    "never unclear": _never_unclear,
    "from the beginning": _from_the_beginning,
}


# ##### The state of shards and journal #####


def look() -> dict[str, Any]:
    """Return the content of the shards, and the unfinished runs of the journal."""
    from django.db import Error
    from django.db.migrations.recorder import MigrationRecorder

    from sharded_orm import runtime
    from sharded_orm.exceptions import ShardDatabaseMissing
    from sharded_orm.models import OperationRun, OperationScript, OperationStep
    from sharded_orm.operations.runs.journal import LEFT

    shards: dict[str, Any] = {}
    schemas: set[str] = set()
    for shard in runtime.group("shop").shards():
        connection: Any = connections[shard.alias]
        try:
            schemas |= connection.schemas_present()
            snapshot = connection.schema_snapshot()
        except (Error, ShardDatabaseMissing):
            continue  # not created yet
        content: dict[str, Any] = {"definitions": dict(snapshot.definitions)}
        if MigrationRecorder.Migration._meta.db_table in snapshot.definitions:
            rows = MigrationRecorder.Migration.objects.using(shard.alias)
            content["records"] = sorted(map(list, rows.values_list("app", "name")))
        with connection.cursor() as cursor:
            for table in ("shop_log", "shop_order"):
                if table in snapshot.definitions:
                    cursor.execute(f"SELECT * FROM {table} ORDER BY id")
                    names = [column[0] for column in cursor.description]
                    rows = [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]
                    content[table] = rows
        shards[shard.alias] = content
        connection.close()
    left = OperationStep.objects.filter(state__in=LEFT)
    return {
        "shards": shards,
        "copies": sorted(name for name in schemas if name.endswith("_rehearsal")),
        "unfinished": OperationRun.objects.filter(unfinished=True).count(),
        "tokens": OperationRun.objects.exclude(token="").count(),
        "scripts": OperationScript.objects.count(),
        "left": sorted(left.values_list("alias", "state", "error")),
    }


# ##### The server process #####


def _command(request: dict[str, Any]) -> int:
    arguments = [str(argument) for argument in request["arguments"]]
    for name in request.get("ablations", ()):
        ABLATIONS[name]()
    listen(Events(Moment(**request["moment"]), f"{request['output']}.events"))
    if arguments == ["look"]:
        print(json.dumps(look()))
        return 0
    try:
        ManagementUtility(["manage.py", *arguments]).execute()
    except SystemExit as exc:
        return exc.code if isinstance(exc.code, int) else bool(exc.code)
    return 0


def _child(request: dict[str, Any]) -> None:
    for number, name in ((1, "out"), (2, "err")):
        opened = os.open(f"{request['output']}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(opened, number)
    status = 70
    try:
        status = _command(request)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main() -> None:
    django.setup()
    # Modules that each command would load again.
    load_command_class("sharded_orm", "migrate_shards")
    MigrationLoader(None, ignore_no_migrations=True)
    keep_all()
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            _, status = os.waitpid(request["wait"], 0)
            print(json.dumps(os.waitstatus_to_exitcode(status)), flush=True)
            continue
        pid = os.fork()
        if not pid:
            _child(request)
        print(json.dumps(pid), flush=True)


if __name__ == "__main__":
    main()
