"""Processes that write rows with lookups: all at once, or killed at a step.

On servers they are forked and use the test's databases. The test's SQLite databases are in memory, so
there each process configures a project on files.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.patience import PATIENCE
from tests.python_process import CONTEXT

KEYS = (1, 2, 3, 4)
EMAILS = 25


class Processes:
    """Runs functions of this module in processes of their own.

    :param folder: a folder for a project on SQLite files; None for the databases of the test.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._context: Any = CONTEXT if folder else multiprocessing.get_context("fork")
        self.run(prepare)

    def start(self, function: Callable[..., Any], *args: Any) -> Any:
        if self._folder is None:
            close_all()
        process = self._context.Process(target=_run, args=(self._folder, function, *args))
        process.start()
        return process

    def run(self, function: Callable[..., Any], *args: Any, killed: bool = False) -> Any:
        """Return what ``function`` returns in a process.

        :param killed: whether the process is to kill itself. The result is then whether it has.
        """
        answers = self._context.SimpleQueue()
        process = self.start(_answer, answers, function, *args)
        result = None
        if not killed:
            result = answers.get()
        process.join(PATIENCE)
        if killed:
            assert process.exitcode in (0, -signal.SIGKILL), process.exitcode
            return process.exitcode != 0
        assert process.exitcode == 0
        if isinstance(result, BaseException):
            raise result
        return result

    def race(self) -> list[list[str]]:
        """Return the addresses that each process has got; all want the same."""
        barrier, answers = self._context.Barrier(len(KEYS)), self._context.SimpleQueue()
        racers = [self.start(_answer, answers, create_all, key, barrier) for key in KEYS]
        results = [answers.get() for _ in racers]
        for racer in racers:
            racer.join(PATIENCE)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results


def close_all() -> None:
    """Close what a fork would copy."""
    from django.db import connections

    from sharded_orm.autonomous_connections import AutonomousConnections

    connections.close_all()
    AutonomousConnections.close_all()


def _run(folder: Path | None, function: Callable[..., Any], *args: Any) -> None:
    if folder is not None:
        _configure(folder)
        function(*args)
        return
    try:
        function(*args)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # without what the test run does at its exit


def _answer(answers: Any, function: Callable[..., Any], *args: Any) -> None:
    try:
        answers.put(function(*args))
    except BaseException as exc:
        answers.put(RuntimeError(repr(exc)))


def _configure(folder: Path) -> None:
    import django
    from django.conf import settings

    from sharded_orm.topology.aliases import sharded_databases

    wal = {"timeout": PATIENCE, "init_command": "PRAGMA journal_mode=WAL"}
    engine = {"ENGINE": "sharded_orm.backends.sqlite3", "OPTIONS": wal}
    settings.configure(
        INSTALLED_APPS=[
            "django.contrib.contenttypes",
            "sharded_orm",
            "sharded_orm.contrib.lookups",
            "tests.finders",
        ],
        DATABASES=sharded_databases(
            {"default": {**engine, "NAME": str(folder / "default.sqlite3")}}
        ),
        DATABASE_ROUTERS=["sharded_orm.routers.ShardRouter"],
        DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
        SHARDED_ORM={
            "NODES": {"local": {**engine, "NAME": str(folder)}},
            "GROUPS": {
                "photos": {
                    "STRATEGY": "modulo",
                    "RANGES": [{"range": (0, 3), "primary": "local"}],
                },
                "events": {
                    "STRATEGY": "modulo",
                    "RANGES": [{"range": (0, 1), "primary": "local"}],
                },
            },
        },
        USE_TZ=True,
    )
    django.setup()


# -- What the processes do ----------------------------------------------------------------


def prepare() -> None:
    from django.conf import settings
    from django.core.management import call_command

    from tests.finders.models import Account

    if "tests.photos" not in settings.INSTALLED_APPS:
        call_command("migrate", verbosity=0, run_syncdb=True)
        for group, count in (("photos", 4), ("events", 2)):
            for number in range(count):
                alias = f"{group}_{number:05}"
                call_command("migrate", database=alias, verbosity=0, run_syncdb=True)
        call_command("lookups", "build", verbosity=0)
    for key in KEYS:  # Let each key have its shard.
        Account.objects.create(id=1000 + key, user_id=key)


def clean() -> None:
    """Delete what the flush of the test does not know of."""
    from sharded_orm.contrib.lookups.models import LookupEntry
    from tests.finders.models import Account

    Account.objects.scatter().delete()
    LookupEntry.objects.all().delete()


def create_all(key: int, barrier: Any) -> list[str]:
    from django.db import IntegrityError

    from tests.finders.models import Account

    got = []
    for number in range(EMAILS):
        email = f"{number}@x"
        barrier.wait(timeout=PATIENCE)
        try:
            Account.objects.create(id=number * 10 + key, user_id=key, email=email, serial=number)
        except IntegrityError:
            continue
        got.append(email)
    return got


def addresses() -> list[str]:
    from tests.finders.models import Account

    return [row.email for row in Account.objects.scatter().filter(email__isnull=False)]


def create(email: str) -> None:
    from tests.finders.models import Account

    Account.objects.create(id=1, user_id=1, email=email, serial=5)


def change(email: str) -> None:
    from tests.finders.models import Account

    Account.objects.filter(user_id=1, id=1).update(email=email, serial=6)


def delete() -> None:
    from tests.finders.models import Account

    Account.objects.filter(user_id=1, id=1).delete()


def beside_own_transaction(mode: str | None) -> list[str]:
    """What a write and a read do within a transaction that has the lock of the file of the entries.

    :param mode: the ``transaction_mode`` of the file, without a log beside it if it is "EXCLUSIVE".
    """
    from django.db import connections, transaction

    from sharded_orm.contrib.lookups.exceptions import LookupRefused
    from tests.finders.models import Account, PlainAccount

    delete()
    create("ada@x")
    connection: Any = connections["default"]
    connection.transaction_mode = mode
    if mode == "EXCLUSIVE":
        with connection.cursor() as cursor:
            cursor.execute("PRAGMA journal_mode=DELETE")
    results = []
    with transaction.atomic():
        PlainAccount.objects.create(id=1, user_id=1)
        try:
            Account.objects.create(id=2, user_id=2, email="new@x")
        except LookupRefused:
            results.append("refused")
        results += [row.email for row in Account.objects.filter(email__in=["ada@x", "new@x"])]
        transaction.set_rollback(True)
    return results


#: The steps at which a process is killed: an owner, its method, and whether after the call.
STEPS = [
    (owner, method, after)
    for owner, method in (
        ("sharded_orm.contrib.lookups.entries", "add"),
        ("sharded_orm.contrib.lookups.entries", "mark"),
        ("sharded_orm.contrib.lookups.entries", "remove"),
        ("sharded_orm.backends.write_hooks.commit.CommitHookMixin", "_commit_writes"),
        ("sharded_orm.backends.write_hooks.commit.CommitHookMixin", "_tell_watchers"),
        ("sharded_orm.contrib.lookups.transaction.TransactionEntries", "ended"),
    )
    for after in (False, True)
]


def killed_at(step: tuple[str, str, bool], function: Callable[..., Any], *args: Any) -> None:
    from django.utils.module_loading import import_string

    path, name, after = step
    owner = import_string(path)
    original = getattr(owner, name)

    def replacement(*args: Any, **kwargs: Any) -> Any:
        if after:
            original(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, name, replacement)
    function(*args)


def state() -> tuple[list[Any], int, int]:
    """The row, and the numbers of missing and duplicate entries."""
    from sharded_orm.contrib.lookups import maintenance
    from tests.finders.models import Account

    rows = list(Account.objects.filter(user_id=1, id=1).values_list("email", "serial"))
    for email, serial in rows:  # As the lookups know it.
        assert Account.objects.get(email=email).serial == serial
        assert Account.objects.filter(serial=serial).count() == 1
    checked = [maintenance.check(lookup) for lookup in maintenance.selected(())]
    return rows, sum(c.missing for c in checked), sum(c.duplicates for c in checked)


def claim(email: str) -> bool:
    """Whether a row of another key gets the address. Waits until the dead writer's session is gone."""
    import time

    from django.conf import settings
    from django.db import IntegrityError

    from sharded_orm.contrib.lookups import reservation
    from tests.finders.models import Account

    if "tests.photos" not in settings.INSTALLED_APPS:
        reservation.QUARANTINE = 0.0  # as if the writer had died long ago
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            row = Account.objects.create(id=2, user_id=2, email=email)
            break
        except IntegrityError as exc:
            if "an open transaction" not in str(exc):
                return False
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)  # between two questions
    row.delete()
    return True


def repaired() -> bool:
    """Whether the lookups are right after a repair."""
    from django.conf import settings

    from sharded_orm.contrib.lookups import maintenance, reservation
    from tests.finders.models import Account

    if "tests.photos" not in settings.INSTALLED_APPS:
        reservation.QUARANTINE = 0.0
    lookups = maintenance.selected(())
    clean = all(maintenance.check(lookup, repair=True).is_clean for lookup in lookups)
    clean = clean and sum(maintenance.check(lookup).surplus for lookup in lookups) == 0
    Account.objects.filter(user_id=1, id=1).delete()
    return clean


def after_a_kill(old: str | None) -> tuple[int, int, bool, bool]:
    """Look at what a killed process has left, repair it, and write the row that the next one changes.

    :returns: the numbers of missing and duplicate entries; whether exactly those values are taken that
        the row has; whether a repair has removed all that was left.
    """
    rows, missing, duplicates = state()
    email = rows[0][0] if rows else None
    taken = {value for value in ("old@x", "new@x") if not claim(value)}
    is_clean = repaired()
    if old is not None:
        create(old)
    return missing, duplicates, taken == {email} - {None}, is_clean
