"""Text keys: equal for the router if and only if they are equal for the database."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import MySQLdb
import pytest
from django.db import connections
from django.db.models import Count
from django.db.transaction import atomic
from django.test import TestCase
from django.test.utils import CaptureQueriesContext

from sharded_orm import runtime
from sharded_orm.backends.collations import PostgreSQLCollations
from sharded_orm.exceptions import InexactShardKey, InvalidShardKey
from sharded_orm.models.fields.text import exact_collation
from sharded_orm.models.text_keys import guard
from tests.cached.models import CachedNote
from tests.photos.models import Event, Story
from tests.queries.conftest import DATABASES
from tests.samples.models import Handle, Letter
from tests.services.mariadb import addresses_from_environment

pytestmark = [pytest.mark.every_backend, pytest.mark.django_db(databases=DATABASES)]

assert_queries = TestCase().assertNumQueries

#: Each is a different key, whatever a collation compares as equal.
SPELLINGS = [
    "Ada",
    "ada",
    "ADA",
    "Ada ",
    "Ada  ",
    " Ada",
    "Ada\t",
    "Ada\u00a0",
    "Ada\u200b",
    "A\u200dda",
    "\ufeffAda",
    "Ad\u00ada",
    "Áda",
    unicodedata.normalize("NFD", "Áda"),
    "Adа",  # a Cyrillic letter
    "straße",
    "strasse",
    "ﬁne",
    "fine",
    "😀",
    "😁",
    " ",
    "",
]
#: PostgreSQL has no text with this character.
NUL = "Ada\0"


@pytest.fixture
def spellings() -> list[str]:
    return SPELLINGS if connections["events_00000"].vendor == "postgresql" else [*SPELLINGS, NUL]


def test_each_spelling_has_rows_of_its_own_under_modulo(db: None, spellings: list[str]) -> None:
    for number, account in enumerate(spellings):
        Event.objects.create(account=account, number=number)
    for number, account in enumerate(spellings):
        of = Event.objects.filter(account=account)
        assert [event.number for event in of] == [number]
        assert (of.count(), of.exists()) == (1, True)
        assert Event.objects.get(account=account).number == number
        assert of.update(number=number + 100) == 1
    both = Event.objects.filter(account__in=["Ada", "ada", "Ada "])
    assert sorted(event.account for event in both) == ["Ada", "Ada ", "ada"]
    for account in spellings:
        assert Event.objects.filter(account=account).delete()[0] == 1
    assert Event.objects.scatter().count() == 0


def test_each_spelling_is_a_key_of_its_own_under_a_directory(
    db: None, spellings: list[str]
) -> None:
    strategy = runtime.strategy("photos")
    # On two shards, so that each has neighbours that a collation could compare as equal.
    strategy.store.place(  # type: ignore[attr-defined]
        "photos",
        {strategy.entry(name): number % 2 for number, name in enumerate(spellings)},  # type: ignore[attr-defined]
    )
    for name in spellings:
        handle = Handle.objects.create(name=name, note=name)
        Letter.objects.create(handle=handle, text=name)
    for name in spellings:
        handle = Handle.objects.get(name=name)
        assert handle.note == name
        assert [letter.text for letter in Letter.objects.filter(handle=name)] == [name]
        assert [letter.text for letter in handle.letters.all()] == [name]
        assert Handle.objects.get_or_create(name=name)[1] is False
        handle.note = "saved"
        handle.save()
        assert Handle.objects.scatter().filter(note="saved").count() == 1
        assert Handle.objects.filter(pk=name).delete()[0] == 2
    assert Letter.objects.scatter().count() == 0


@pytest.fixture
def altered() -> Iterator[Any]:
    """Change the collation of a key where the library reads it; it is restored afterwards.

    On a server the collation is in the table and those that refer to it, on SQLite in the model.
    """
    undo: list[Callable[[], None]] = []

    def alter(model: Any, name: str, collation: str | None, aliases: list[str]) -> Any:
        field = model._meta.get_field(name)
        before = field.db_collation
        exact = before or exact_collation(connections[aliases[0]])
        references = [(each.field, each.related_model) for each in model._meta.related_objects]

        def change(to: str | None) -> None:
            if _is_sqlite():
                field.db_collation = to if to == collation else before
                return
            for alias in aliases:
                with connections[alias].schema_editor() as editor:
                    for one, owner in references:
                        for foreign in editor._constraint_names(
                            owner, [one.column], foreign_key=True
                        ):
                            editor.execute(editor._delete_fk_sql(owner, foreign))
                    for one, owner in ((field, model), *references):
                        table, column_type = owner._meta.db_table, one.db_type(editor.connection)
                        if editor.connection.vendor == "mysql":
                            editor.execute(
                                f"ALTER TABLE {table} MODIFY {one.column} {column_type}"
                                f" COLLATE {to} NOT NULL"
                            )
                        else:
                            _alter_on_postgresql(editor, table, one.column, column_type, to)
                    for one, owner in references:
                        name = "_fk_%(to_table)s_%(to_column)s"
                        editor.execute(editor._create_fk_sql(owner, one, name))

        def put_back() -> None:
            if put_back in undo:
                undo.remove(put_back)
                change(exact)

        change(collation)
        undo.append(put_back)
        guard.forget()
        return put_back

    yield alter
    for each in undo[:]:
        each()
    guard.forget()


@pytest.fixture
def looks(db: None) -> Iterator[Callable[[], list[int]]]:
    """Return the number of shards of each query for collations, from the servers' logs."""
    if _is_sqlite():
        yield list
        return
    if connections["events_00000"].vendor == "postgresql":
        with _looks_on_postgresql() as counts:
            yield lambda: sorted(counts)
        return
    schema = connections["events_00000"].settings_dict["NAME"].removesuffix("00000")
    servers = [
        MySQLdb.connect(**a.mysqldb(), autocommit=True) for a in addresses_from_environment()
    ]

    def on_each(*statements: str) -> list[str]:
        rows: list[Any] = []
        for server in servers:
            cursor = server.cursor()
            for statement in statements:
                cursor.execute(statement)
            rows += cursor.fetchall()
        return [str(row[0]) for row in rows]

    # Another process of the same run may use the log, too.
    on_each("SELECT GET_LOCK('sharded_orm_tests_log', 600)")
    on_each("SET GLOBAL log_output = 'TABLE'", "TRUNCATE mysql.general_log")
    on_each("SET GLOBAL general_log = 1")
    try:
        yield lambda: sorted(
            asked.partition("table_schema IN")[2].partition("AND")[0].count(schema)
            for asked in on_each("SELECT CONVERT(argument USING utf8mb4) FROM mysql.general_log")
            if "FROM information_schema.columns WHERE table_schema IN" in asked and schema in asked
        )
    finally:
        on_each("SET GLOBAL general_log = 0", "SELECT RELEASE_LOCK('sharded_orm_tests_log')")
        for server in servers:
            server.close()


@contextmanager
def _looks_on_postgresql() -> Iterator[list[int]]:
    """Record the number of shards of each query for collations during the block.

    They pass by the log of statements, and the server's log belongs to other tests as well.
    """
    from sharded_orm.backends.postgresql.base import DatabaseWrapper

    counts: list[int] = []
    run = DatabaseWrapper._unlogged_rows

    def recorded(wrapper: Any, shards: Any, sql: str, params: Any) -> Any:
        counts.append(len(shards))
        return run(wrapper, shards, sql, params)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DatabaseWrapper, "_unlogged_rows", recorded)
        yield counts


def _alter_on_postgresql(
    editor: Any, table: str, column: str, column_type: str, collation: str | None
) -> None:
    if collation is None:
        editor.execute(f"ALTER TABLE {table} ALTER COLUMN {column} TYPE {column_type}")
        return
    # Django's index for LIKE compares bytes, and so cannot have such a collation.
    with editor.connection.cursor() as cursor:
        cursor.execute(
            "SELECT indexname FROM pg_indexes WHERE schemaname = current_schema()"
            " AND tablename = %s AND indexdef LIKE %s",
            [table, "%_pattern_ops%"],
        )
        for (index,) in cursor.fetchall():
            cursor.execute(f"DROP INDEX {index}")
    editor.execute(
        f"CREATE COLLATION IF NOT EXISTS {collation}"
        " (provider = icu, locale = 'und-u-ks-level2', deterministic = false)"
    )
    editor.execute(
        f"ALTER TABLE {table} ALTER COLUMN {column} TYPE {column_type} COLLATE {collation}"
    )


def _is_sqlite() -> bool:
    return bool(connections["events_00000"].vendor == "sqlite")


def _on(group: str, number: int) -> str:
    """Return a key that is on shard ``number``."""
    strategy = runtime.strategy(group)
    return next(name for name in map(str, range(1000)) if strategy.locate(name) == number)


def aliases(group: str) -> list[str]:
    return [shard.alias for shard in runtime.group(group).shards()]


def inexact() -> list[str]:
    """Collations by which two of the spellings are equal."""
    if connections["events_00000"].vendor == "sqlite":
        return ["NOCASE", "RTRIM"]
    if connections["events_00000"].vendor == "postgresql":
        return ["any_case"]
    return ["utf8mb4_general_ci", "utf8mb4_bin", "utf8mb4_general_nopad_ci"]


USES: list[Callable[[], Any]] = [
    lambda: list(Event.objects.filter(account="Ada")),
    lambda: Event.objects.filter(account__in=["Ada", "ada"]).count(),
    lambda: Event.objects.get(account="Ada"),
    lambda: Event.objects.filter(account="Ada").exists(),
    lambda: Event.objects.filter(account="Ada").update(number=1),
    lambda: Event.objects.filter(account="Ada").delete(),
    lambda: Event.objects.create(account="Ada"),
    lambda: Event.objects.bulk_create([Event(account="Ada"), Event(account="Bob")]),
    lambda: Event.objects.get_or_create(account="Ada"),
    lambda: Event.objects.update_or_create(account="Ada", defaults={"number": 1}),
    lambda: Event(account="Ada").save(),
    lambda: list(Event.objects.scatter()),
    lambda: list(Event.objects.scatter().values("account").annotate(Count("pk"))),
    lambda: Event.objects.scatter().aggregate(Count("account", distinct=True)),
    lambda: Event.objects.scatter(partial=True).count(),
    lambda: list(Event.objects.using("events_00003").filter(account="Ada")),
    lambda: list(Event.objects.filter(account="Ada").iterator()),
    lambda: Event.objects.using("events_00003").filter(account="Ada").exists(),
    lambda: list(
        Story.objects.using("events_00003").filter(text__in=Event.objects.values("account"))
    ),
]


class TestFirstUse:
    pytestmark = [pytest.mark.django_db(transaction=True, databases=DATABASES)]

    @pytest.mark.parametrize("number", range(3))
    def test_an_inexact_collation_is_refused(self, altered: Any, number: int) -> None:
        if number >= len(inexact()):
            pytest.skip("this database has fewer of them")
        collation = inexact()[number]
        altered(Event, "account", collation, aliases("events"))
        for use in USES:
            with pytest.raises(InexactShardKey) as caught:
                use()
            said = str(caught.value)
            assert "photos_app.Event.account" in said
            assert "photos_app_event.account" in said
            assert repr(collation) in said
            assert "'events_0000" in said
            assert "ExactCharField" in said
            assert "migrate_shards" in said
        # Other tables of the group are not affected.
        Story.objects.create(author=3, text="x")
        assert Story.objects.filter(author=3).count() == 1

    def test_nothing_is_sent(self, altered: Any) -> None:
        altered(Event, "account", inexact()[0], aliases("events"))
        with CaptureQueriesContext(connections["events"]) as sent:
            for use in USES:
                with pytest.raises(InexactShardKey):
                    use()
        assert {query["sql"] for query in sent} <= {"BEGIN", "ROLLBACK"}

    def test_a_foreign_key_to_the_key_is_a_key(self, altered: Any) -> None:
        strategy = runtime.strategy("photos")
        strategy.store.place("photos", {strategy.entry("ada"): 5})  # type: ignore[attr-defined]
        handle = Handle.objects.create(name="ada")
        altered(Handle, "name", inexact()[0], ["photos_00005"])
        for use in (
            lambda: list(Letter.objects.filter(handle="ada")),
            lambda: list(handle.letters.all()),
            lambda: Letter.objects.create(handle=handle),
            lambda: list(Letter.objects.filter(handle__name="ada")),
            lambda: list(Letter.objects.using("photos_00005").select_related("handle")),
            lambda: list(Letter.objects.using("photos_00005").order_by("handle__note")),
            handle.delete,
            handle.refresh_from_db,
        ):
            with pytest.raises(InexactShardKey, match=r"samples.*photos_00005"):
                use()  # type: ignore[no-untyped-call]

    @pytest.mark.mysql_settings
    def test_only_the_shard_that_is_wrong_is_refused(self, altered: Any) -> None:
        altered(Event, "account", inexact()[0], ["events_00005"])
        Event.objects.create(account=_on("events", 4))
        with pytest.raises(InexactShardKey, match="'events_00005'"):
            Event.objects.create(account=_on("events", 5))
        with pytest.raises(InexactShardKey, match="'events_00005'"):
            Event.objects.scatter().count()
        assert Event.objects.filter(account__in=[_on("events", 4), _on("events", 6)]).count() == 1

    def test_a_process_goes_on_when_the_column_is_mended(self, altered: Any) -> None:
        undo = altered(Event, "account", inexact()[0], aliases("events"))
        with pytest.raises(InexactShardKey):
            Event.objects.filter(account="Ada").exists()
        undo()
        assert not Event.objects.filter(account="Ada").exists()

    @pytest.mark.postgresql_settings
    def test_the_statement_of_the_remedy_mends_the_column(self, altered: Any) -> None:
        altered(Event, "account", inexact()[0], ["events_00005"])
        connection: Any = connections["events_00005"]
        table, column = "photos_app_event", "account"
        types = connection.column_types([connection.shard], [table], [column])
        definition = types["events_00005"][table][column].definition
        sql = PostgreSQLCollations().exact_column_sql(table, column, definition, "")
        with connection.cursor() as cursor:
            cursor.execute(sql)
        guard.forget()
        assert not Event.objects.using("events_00005").exists()
        types = connection.column_types([connection.shard], [table], [column])
        assert types["events_00005"][table][column].definition == definition

    @pytest.mark.mysql_settings
    def test_a_column_that_drops_spaces_is_refused(self, altered: Any) -> None:
        with connections["events_00003"].cursor() as cursor:
            table = "ALTER TABLE photos_app_event MODIFY account"
            cursor.execute(f"{table} CHAR(100) COLLATE utf8mb4_nopad_bin NOT NULL")
            guard.forget()
            try:
                with pytest.raises(InexactShardKey, match="type CHAR"):
                    Event.objects.using("events_00003").exists()
            finally:
                cursor.execute(f"{table} VARCHAR(100) COLLATE utf8mb4_nopad_bin NOT NULL")

    @pytest.mark.mysql_settings
    def test_bytes_are_exact(self, altered: Any) -> None:
        with connections["events_00003"].cursor() as cursor:
            table = "ALTER TABLE photos_app_event MODIFY account"
            cursor.execute(f"{table} VARBINARY(100) NOT NULL")
            guard.forget()
            try:
                assert not Event.objects.using("events_00003").exists()
            finally:
                cursor.execute(f"{table} VARCHAR(100) COLLATE utf8mb4_nopad_bin NOT NULL")


class TestMigrating:
    """A wrong collation can be fixed, and earlier operations of the migration run."""

    pytestmark = [pytest.mark.django_db(transaction=True, databases=DATABASES)]

    def test_a_data_migration_before_the_one_that_mends(self, altered: Any) -> None:
        altered(Event, "account", inexact()[0], ["events_00005"])
        connection = connections["events_00005"]
        name = _on("events", 5)
        with connection.schema_editor():
            Event.objects.create(account=name)
            assert Event.objects.filter(account=name).count() == 1
        with pytest.raises(InexactShardKey):
            Event.objects.filter(account=name).count()


class TestCosts:
    pytestmark = [pytest.mark.django_db(databases=DATABASES)]

    def test_of_one_shard(self, db: None, looks: Callable[[], list[int]]) -> None:
        """One query per shard and process for all tables; on SQLite none, and none is logged."""
        guard.forget()
        of = Event.objects.using("events_00003")
        with assert_queries(1, using="events"):
            of.filter(account="Ada").exists()
        of.create(account=_on("events", 3))
        of.filter(account="Ada").count()
        CachedNote.objects.using("events_00003").filter(account="Ada").delete()
        assert looks() == ([] if _is_sqlite() else [1])

    def test_of_a_scatter(self, db: None, looks: Callable[[], list[int]]) -> None:
        """One query per node."""
        guard.forget()
        Event.objects.scatter().count()
        Event.objects.scatter().count()
        Event.objects.using("events_00003").count()
        assert looks() == ([] if _is_sqlite() else [4, 4])

    def test_of_keys_that_are_not_text(self, db: None, looks: Callable[[], list[int]]) -> None:
        guard.forget()
        Story.objects.filter(author=3).count()
        Story.objects.scatter().count()
        Story.objects.create(author=3)
        assert looks() == []


class TestLength:
    pytestmark = [pytest.mark.django_db(databases=DATABASES)]

    @pytest.mark.mysql_settings
    def test_a_key_that_the_database_would_shorten_is_refused(self, db: None) -> None:
        """A server drops spaces that do not fit without an error, and would change the key."""
        too_long = "a" * 99 + "  "
        for use in (
            lambda: Event.objects.create(account=too_long),
            lambda: Event.objects.bulk_create([Event(account="b"), Event(account=too_long)]),
            lambda: Event(account=too_long).save(),
            lambda: Event.objects.get_or_create(account=too_long),
        ):
            with (
                pytest.raises(InvalidShardKey, match="does not fit into photos_app"),
                atomic("events"),
            ):
                use()
        longest = "a" * 99 + " "
        Event.objects.create(account=longest)
        assert Event.objects.get(account=longest).account == longest
