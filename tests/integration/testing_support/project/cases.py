"""Tests as a user of the library writes them; run by the tests in the folder above.

The tests of a class do the same in every order, so rows of one test that another one sees make
it fail.
"""

# These run under unittest.
# ruff: noqa: PT009, PT027

from __future__ import annotations

import contextlib
import os
import threading
import urllib.request
from typing import Any

from django.conf import settings
from django.core.management import call_command
from django.db import IntegrityError, connections, transaction
from django.test import (
    LiveServerTestCase,
    SimpleTestCase,
    TestCase,
    TransactionTestCase,
    tag,
)
from django.test.testcases import DatabaseOperationForbidden

from sharded_orm import runtime
from sharded_orm.models.tables.directory import Placement
from sharded_orm.operations.tickets.creation import create
from sharded_orm.testing import ensure_shards
from tests.integration.testing_support.project.notes.models import Event, Note, Person, Remark

MIGRATED = [] if "PROJECT_WITHOUT_MIGRATIONS" in os.environ else ["from a migration"]


def on(owner: int) -> Any:
    """Return the connection of the shard of ``owner``."""
    return connections[f"notes_{owner % 8:05d}"]


def place(connection: Any) -> str:
    """Return the name of a shard's schema, or of its file."""
    settings = connection.settings_dict
    return str(settings.get("SCHEMA") or settings["NAME"])


def texts(owner: int) -> list[str]:
    """Return all notes on the shard of ``owner``, including those of the migration."""
    notes = Note.objects.using(on(owner).alias).order_by("text")
    return list(notes.values_list("text", flat=True))


def committed(owner: int) -> list[str]:
    """Return the notes that another connection sees."""
    other = on(owner).copy()
    try:
        with other.cursor() as cursor:
            cursor.execute("SELECT text FROM notes_note ORDER BY text")
            return [text for (text,) in cursor.fetchall()]
    finally:
        other.close()


def in_thread(function: Any) -> Any:
    """Return the result of ``function`` in a new thread, and close its connections."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(function())
        except BaseException as exc:
            outcome.append(exc)
        finally:
            connections.close_all()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return outcome[0]


class Recorded(SimpleTestCase):
    """Records which process ran the test, with which schemas."""

    def setUp(self) -> None:
        super().setUp()
        name = place(on(1))
        with open(os.path.join(os.environ["PROJECT_FOLDER"], "ran"), "a") as file:
            file.write(f"{os.getpid()} {name} {self.id()}\n")


class RollsBack(Recorded, TestCase):
    databases = {"default", "notes"}

    @classmethod
    def setUpTestData(cls) -> None:
        cls.person = Person.objects.create(name="one")
        cls.note = Note.objects.create(owner=1, text="of the class")

    def _write_everywhere(self) -> None:
        self.assertEqual(texts(1), [*MIGRATED, "of the class"])
        self.assertEqual(texts(2), MIGRATED)  # first use inside the test
        Note.objects.create(owner=1, text="of the test")
        for owner in (2, 6):
            note = Note.objects.create(owner=owner, text="of the test")
            Remark.objects.create(owner=owner, note=note, text="!")
        with transaction.atomic(using="notes"):
            Note.objects.create(owner=3, text="nested")
        with self.assertRaises(ValueError), transaction.atomic(using="notes"):
            Note.objects.create(owner=3, text="nested and undone")
            raise ValueError
        with transaction.atomic(using=on(5).alias, durable=True):
            Note.objects.create(owner=5, text="durable")
        self.assertEqual(texts(3), [*MIGRATED, "nested"])
        self.assertEqual(texts(5), ["durable", *MIGRATED])
        for owner in (1, 2, 3, 5, 6):
            self.assertEqual(committed(owner), MIGRATED)

    def test_a(self) -> None:
        self._write_everywhere()

    def test_b(self) -> None:
        self._write_everywhere()

    def test_c(self) -> None:
        self._write_everywhere()

    def test_hooks_can_be_captured_by_group_and_by_shard(self) -> None:
        for alias in ("notes", on(4).alias):
            ran: list[str] = []
            with self.captureOnCommitCallbacks(using=alias, execute=True) as callbacks:
                Note.objects.create(owner=4, text="x")
                transaction.on_commit(lambda r=ran: r.append("x"), using=on(4).alias)
            self.assertEqual((len(callbacks), ran), (1, ["x"]))

    def test_statements_are_counted_by_group_and_by_shard(self) -> None:
        on(1).ensure_connection()
        texts(2)
        with self.assertNumQueries(2, using="notes"), self.assertNumQueries(1, using=on(1).alias):
            texts(1)
            texts(2)
        with self.assertNumQueries(0, using="notes"):
            Person.objects.count()

    def test_views(self) -> None:
        self.client.get("/write/?owner=1&owner=7")
        with self.assertRaises(ValueError):
            self.client.get("/write/?owner=1&owner=7&fail=1")
        self.assertEqual(texts(7), [*MIGRATED, "view"])
        self.assertEqual(committed(7), MIGRATED)


class AfterRollsBack(Recorded, TestCase):
    databases = {"default", "notes"}

    def test_nothing_is_left(self) -> None:
        for owner in range(8):
            self.assertEqual(texts(owner), MIGRATED)
        self.assertEqual(Person.objects.count(), 0)


class WritesToAllDatabases(Recorded):
    databases = "__all__"

    def _write(self) -> None:
        # The group has the directory strategy: saving the row has placed the owner.
        self.assertFalse(Event.objects.filter(owner=3).exists())
        self.assertEqual(Placement.objects.count(), 0)
        Event.objects.create(owner=3)
        self.assertEqual(Event.objects.filter(owner=3).count(), 1)
        self.assertEqual(Placement.objects.count(), 1)
        Note.objects.create(owner=3, text="x")
        self.assertEqual(len(texts(3)), 2)


class AllDatabases(WritesToAllDatabases, TestCase):
    def test_a(self) -> None:
        self._write()

    def test_b(self) -> None:
        self._write()


class AllDatabasesCommitted(WritesToAllDatabases, TransactionTestCase):
    def test_a(self) -> None:
        self._write()

    def test_b(self) -> None:
        self._write()


class Fixtures(Recorded):
    """The rows of a fixture, on the databases that a class names."""

    databases = {"default", "notes"}
    fixtures = ["notes.json"]

    def _check(self) -> None:
        self.assertEqual(list(Person.objects.values_list("name", flat=True)), ["of a fixture"])
        for owner in (1, 6):
            self.assertEqual(texts(owner), [*MIGRATED, f"of {owner}"])
            self.assertEqual(Remark.objects.get(owner=owner).note.text, f"of {owner}")
        Note.objects.filter(owner=1).update(text="changed")
        Note.objects.create(owner=6, text="of the test")
        self.assertEqual(len(texts(6)), len([*MIGRATED, "of 6", "of the test"]))


class LoadsFixtures(Fixtures, TestCase):
    def test_a(self) -> None:
        self._check()
        self.assertEqual(committed(1), MIGRATED)

    def test_b(self) -> None:
        self._check()


class LoadsFixturesCommitted(Fixtures, TransactionTestCase):
    def test_a(self) -> None:
        self._check()
        self.assertEqual(committed(1), ["changed", *MIGRATED])

    def test_b(self) -> None:
        self._check()


class LoadsFixturesOfTheDefaultDatabase(Fixtures, TestCase):
    """The group is not among its databases, as for any other database that Django tests do not name."""

    databases = {"default"}

    def test_a(self) -> None:
        self.assertEqual(Person.objects.count(), 1)
        with self.assertRaisesMessage(DatabaseOperationForbidden, "'notes'"):
            texts(1)


class LoadsFixturesByHand(Recorded, TestCase):
    databases = {"default", "notes"}

    def test_a(self) -> None:
        call_command("loaddata", "notes.json", verbosity=0)
        self.assertEqual(Person.objects.count(), 1)
        self.assertEqual(texts(6), [*MIGRATED, "of 6"])


class OverriddenSettings(Recorded, TestCase):
    databases = {"default", "notes"}

    def test_still_test_shards(self) -> None:
        Note.objects.create(owner=1, text="x")
        with self.settings(SHARDED_ORM={**settings.SHARDED_ORM, "MAX_IDLE_ALIASES": 5}):
            self.assertIn("test_", place(on(2)))
            self.assertEqual(texts(1), [*MIGRATED, "x"])
            self.assertEqual(texts(2), MIGRATED)
        self.assertIn("test_", place(on(3)))
        self.assertEqual(texts(3), MIGRATED)


class Blocked(Recorded, TestCase):
    """The group is not among the databases of this class."""

    def test_reading_and_writing(self) -> None:
        for statement in (
            lambda: texts(1),
            lambda: Note.objects.create(owner=1, text="x"),
            lambda: Note.objects.filter(owner=2).count(),
            lambda: on(3).cursor(),
        ):
            with self.assertRaisesMessage(DatabaseOperationForbidden, "'notes'"):
                statement()

    def test_in_another_thread(self) -> None:
        outcome = in_thread(lambda: texts(1))
        self.assertIsInstance(outcome, DatabaseOperationForbidden)


class BlockedWithoutDatabases(Recorded, SimpleTestCase):
    def test_reading(self) -> None:
        with self.assertRaisesMessage(DatabaseOperationForbidden, "'notes'"):
            texts(1)


if "PROJECT_TICKETS" in os.environ:
    # A session with the real server, before there are test databases.
    create(["real"])
    runtime.tickets().next("real")

    class BlockedTickets(Recorded, TestCase):
        """The ticket server is not among the databases of this class."""

        databases = {"default", "notes"}

        def test_next_id(self) -> None:
            with self.assertRaisesMessage(DatabaseOperationForbidden, "'tickets'"):
                runtime.tickets().next("real")


class AfterBlocked(Recorded, TestCase):
    databases = {"default", "notes"}

    def test_works_again(self) -> None:
        self.assertEqual(texts(1), MIGRATED)


class Commits(Recorded, TransactionTestCase):
    databases = {"default", "notes"}

    def _write(self) -> None:
        for owner in range(8):
            self.assertEqual(texts(owner), MIGRATED)
        hooks: list[list[str]] = []
        with transaction.atomic(using="notes"):
            for owner in (1, 6):
                note = Note.objects.create(owner=owner, text="committed")
                Remark.objects.create(owner=owner, note=note, text="!")
            transaction.on_commit(lambda: hooks.append(committed(1)), using=on(1).alias)
        self.assertEqual(hooks, [["committed", *MIGRATED]])
        with self.assertRaises(ValueError), transaction.atomic(using="notes"):
            Note.objects.create(owner=1, text="undone")
            Note.objects.create(owner=2, text="undone")
            raise ValueError
        self.assertEqual(committed(2), MIGRATED)
        if "PROJECT_DIES" in os.environ:
            os._exit(3)
        in_thread(lambda: Note.objects.create(owner=3, text="of a thread"))
        self.assertEqual(committed(3), [*MIGRATED, "of a thread"])

    def test_a(self) -> None:
        self._write()

    def test_b(self) -> None:
        self._write()

    def test_flush_keeps_what_it_did_not_touch(self) -> None:
        ensure_shards("notes")
        self.assertEqual(texts(0), MIGRATED)


class CommitsWithSerializedRollback(Commits):
    serialized_rollback = True


class ResetsSequences(Recorded, TransactionTestCase):
    databases = {"default", "notes"}
    reset_sequences = True

    def _write(self) -> None:
        # The row of the migration has number 1.
        self.assertEqual(Note.objects.create(owner=1, text="x").pk, 2)
        self.assertEqual(Remark.objects.create(owner=1, note_id=2, text="x").pk, 1)

    def test_a(self) -> None:
        self._write()

    def test_b(self) -> None:
        self._write()


class AtomicRequests(Recorded, TransactionTestCase):
    databases = {"default", "notes"}

    def test_commits_with_the_view(self) -> None:
        response = self.client.get("/write/?owner=1&owner=6")
        # Both were in a transaction until the view returned.
        self.assertEqual(response.content.decode(), "notes_00001, notes_00006")
        self.assertEqual(committed(1), [*MIGRATED, "view"])
        self.assertEqual(committed(6), [*MIGRATED, "view"])

    def test_rolls_back_all_shards_when_the_view_fails(self) -> None:
        with self.assertRaisesMessage(ValueError, "the view fails"):
            self.client.get("/write/?owner=1&owner=6&fail=1")
        self.assertEqual(committed(1), MIGRATED)
        self.assertEqual(committed(6), MIGRATED)

    def test_a_view_may_opt_out(self) -> None:
        with self.assertRaises(ValueError):
            self.client.get("/write_at_once/?owner=1&fail=1")
        self.assertEqual(committed(1), [*MIGRATED, "view"])

    def test_async_views_are_refused_as_by_django(self) -> None:
        with self.assertRaisesMessage(RuntimeError, "ATOMIC_REQUESTS with async views"):
            self.client.get("/write_async/")

    async def test_sync_view_under_the_async_client(self) -> None:
        response = await self.async_client.get("/write/?owner=1")
        self.assertEqual(response.content.decode(), "notes_00001")


class LiveServer(Recorded, LiveServerTestCase):
    databases = {"default", "notes"}

    def _get(self, path: str) -> str:
        with urllib.request.urlopen(self.live_server_url + path) as response:
            return str(response.read().decode())

    def test_threads_share_rows_not_connections(self) -> None:
        Note.objects.create(owner=9, text="of the test")
        self.assertEqual(self._get("/count/?owner=9"), "1")
        self._get("/write/?owner=9&owner=14")
        self.assertEqual(texts(9), [*MIGRATED, "of the test", "view"])

    def test_and_nothing_is_left(self) -> None:
        self.assertEqual(texts(9), MIGRATED)
        self.assertEqual(self._get("/count/?owner=9"), "0")


@tag("fails")
class BreaksConstraint(TestCase):
    """Fails in its teardown on databases that defer constraints, else at the write."""

    databases = {"default", "notes"}

    def test_dangling_reference(self) -> None:
        with contextlib.ExitStack() as stack:
            if not connections["notes"].features.can_defer_constraint_checks:
                stack.enter_context(transaction.atomic(using="notes"))
                stack.enter_context(self.assertRaises(IntegrityError))
            Remark.objects.create(owner=1, note_id=999, text="x")


@tag("fails")
class Fails(TestCase):
    """Fails after a statement on a shard."""

    databases = {"default", "notes"}

    def test_fails(self) -> None:
        Note.objects.create(owner=1, text="x")
        self.fail()
