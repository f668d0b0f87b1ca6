"""Timestamped ids that real PostgreSQL generates as the default of a column (I2, I3)."""

from __future__ import annotations

import itertools
import os
import sys
import threading
from array import array
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.apps import apps
from django.db import connections
from django.db.utils import ConnectionHandler

from sharded_orm.exceptions import InvalidID
from sharded_orm.ids.layout import PACKED, TimestampedID, TimestampedLayout
from sharded_orm.ids.timestamps_postgresql import (
    create_function,
    create_sequence,
    function_name,
    set_default,
)
from sharded_orm.models import ShardedQuerySet
from sharded_orm.models.after_migrate.postgresql_defaults import after_migrate
from tests.patience import PATIENCE
from tests.photos.models import Visit
from tests.services.postgresql import Address, PostgreSQLServer

psycopg = pytest.importorskip("psycopg")

LAYOUT = TimestampedLayout()
PACKED_IDS = PACKED.counted(77, 3)
HOUR = timedelta(hours=1)
_numbers = itertools.count(1)
#: The ids of the long test, in all; and in one statement.
MILLIONS = int(os.environ.get("TIMESTAMPED_IDS", "1000000"))
BATCH = 5000


@pytest.fixture
def connection(postgresql: Address) -> Iterator[Any]:
    with closing(psycopg.connect(**postgresql.psycopg(), autocommit=True)) as made:
        yield made


@pytest.fixture
def schema(connection: Any) -> Iterator[str]:
    """A schema of the test's own, whose name has to be quoted."""
    name = f'Shard "{next(_numbers)}"'
    yield from _made(connection, name)


@pytest.fixture
def other_schema(connection: Any) -> Iterator[str]:
    yield from _made(connection, f"shard'{next(_numbers)}")


def _made(connection: Any, schema: str) -> Iterator[str]:
    connection.execute(f"CREATE SCHEMA {quoted(schema)}")
    yield schema
    connection.execute(f"DROP SCHEMA {quoted(schema)} CASCADE")


def quoted(name: str) -> str:
    return '"{}"'.format(name.replace('"', '""'))


def make(
    connection: Any,
    schema: str,
    shard: int,
    layout: TimestampedLayout = LAYOUT,
    table: str = "Likes",
) -> str:
    """Create a table with timestamped ids and return its qualified name."""
    name = f"{quoted(schema)}.{quoted(table)}"
    connection.execute(f'CREATE TABLE {name} ("ID" bigint PRIMARY KEY, "user" int)')
    give_ids(connection, schema, table, shard, layout)
    return name


def give_ids(
    connection: Any, schema: str, table: str, shard: int, layout: TimestampedLayout = LAYOUT
) -> None:
    connection.execute(create_function(schema, shard, layout))
    for statement in create_sequence(schema, table, "ID"):
        connection.execute(statement)
    connection.execute(set_default(schema, table, "ID", layout))


def insert(connection: Any, table: str, count: int = 1) -> list[int]:
    rows = connection.execute(
        f'INSERT INTO {table} ("user") SELECT n FROM generate_series(1, {count}) AS n'
        ' RETURNING "ID"'
    )
    return [number for (number,) in rows.fetchall()]


def step_back(connection: Any, schema: str, table: str, ahead: timedelta) -> int:
    """Set the last id of a table ahead, as if the clock had been set back by that time."""
    last = TimestampedID.at(datetime.now(UTC) + ahead, 0, 0)
    state = last.milliseconds << 10
    sequence = f"{quoted(schema)}.{quoted(table + '_ID_last')}"
    connection.execute("SELECT setval(%s::regclass, %s)", [sequence, state])
    return last.milliseconds


def test_an_id_comes_back_with_the_insert_and_says_when_and_where(
    connection: Any, schema: str
) -> None:
    table = make(connection, schema, 1341)
    # The server's clock is this machine's.
    before = datetime.now(UTC) - timedelta(milliseconds=1)
    (first,), (second,) = insert(connection, table), insert(connection, table)
    after = datetime.now(UTC)
    parts = [TimestampedID.from_int(number) for number in (first, second)]
    assert [part.shard for part in parts] == [1341, 1341]
    assert before <= parts[0].time <= parts[1].time <= after
    assert first < second


def test_each_schema_has_its_own_shard(connection: Any, schema: str, other_schema: str) -> None:
    tables = [make(connection, schema, 0), make(connection, other_schema, 8191)]
    ids = [insert(connection, table, 100) for table in tables]
    assert {TimestampedID.from_int(number).shard for number in ids[0]} == {0}
    assert {TimestampedID.from_int(number).shard for number in ids[1]} == {8191}


def test_an_explicit_id_is_kept(connection: Any, schema: str) -> None:
    table = make(connection, schema, 5)
    assert connection.execute(f'INSERT INTO {table} VALUES (7, 1) RETURNING "ID"').fetchone() == (
        7,
    )


@pytest.mark.parametrize(
    "layout",
    [
        TimestampedLayout(time_bits=40, shard_bits=20, sequence_bits=3),
        TimestampedLayout(time_bits=50, shard_bits=5, sequence_bits=8),
        TimestampedLayout(epoch=datetime(1960, 1, 1, tzinfo=UTC), time_bits=48, shard_bits=5),
    ],
)
def test_other_widths(connection: Any, schema: str, layout: TimestampedLayout) -> None:
    table = make(connection, schema, 31, layout)
    ids = insert(connection, table, 500)
    parts = [TimestampedID.from_int(number, layout) for number in ids]
    assert {part.shard for part in parts} == {31}
    assert timedelta(0) <= datetime.now(UTC) - parts[-1].time < HOUR
    assert ids == sorted(set(ids))


def test_who_finds_a_millisecond_used_up_waits_for_the_next(connection: Any, schema: str) -> None:
    layout = TimestampedLayout(sequence_bits=2)
    table = make(connection, schema, 5, layout)
    before = datetime.now(UTC) - timedelta(milliseconds=1)
    parts = [TimestampedID.from_int(number, layout) for number in insert(connection, table, 401)]
    assert before <= parts[0].time
    assert parts[-1].time <= datetime.now(UTC)
    assert parts[-1].milliseconds - parts[0].milliseconds >= 100


def test_concurrent_bulk_inserts_are_unique(
    postgresql: Address, connection: Any, schema: str
) -> None:
    """The published function generates duplicates here, between nextval and clock."""
    table = make(connection, schema, 5)
    barrier = threading.Barrier(4)
    drawn: list[list[int]] = []

    def draw() -> None:
        with closing(psycopg.connect(**postgresql.psycopg(), autocommit=True)) as mine:
            barrier.wait(PATIENCE)
            drawn.append(insert(mine, table, 20_000))
            for _ in range(100):
                drawn.append(insert(mine, table))

    threads = [threading.Thread(target=draw) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    ids = [number for some in drawn for number in some]
    assert len(ids) == len(set(ids)) == 4 * 20_100
    assert all(some == sorted(some) for some in drawn)


def test_no_one_waits_for_another_s_transaction(
    postgresql: Address, connection: Any, schema: str
) -> None:
    table = make(connection, schema, 5)
    with closing(psycopg.connect(**postgresql.psycopg())) as open_one:
        (first,) = insert(open_one, table)
        connection.execute("SET statement_timeout = '5s'")
        (second,) = insert(connection, table)
        open_one.rollback()
    (third,) = insert(connection, table)
    # A rollback does not give ids back.
    assert first < second < third


def test_an_error_leaves_no_lock(postgresql: Address, connection: Any, schema: str) -> None:
    table = make(connection, schema, 5, TimestampedLayout(epoch=datetime.now(UTC) + HOUR))
    with closing(psycopg.connect(**postgresql.psycopg())) as other:
        with pytest.raises(psycopg.errors.NumericValueOutOfRange, match="before the epoch"):
            insert(other, table)
        ((locks,),) = connection.execute(
            "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = %s",
            [other.info.backend_pid],
        ).fetchall()
    assert locks == 0


def test_a_clock_that_steps_back_repeats_nothing(connection: Any, schema: str) -> None:
    table = make(connection, schema, 5)
    insert(connection, table)
    ahead = step_back(connection, schema, "Likes", HOUR)
    ids = insert(connection, table, 2500)
    assert ids == sorted(set(ids))
    counts: dict[int, int] = {}
    for number in ids:
        ms = TimestampedID.from_int(number).milliseconds
        counts[ms] = counts.get(ms, 0) + 1
    # A millisecond has 1024 numbers, of which the first was taken; the others are in the next.
    assert counts == {ahead: 1023, ahead + 1: 1024, ahead + 2: 453}


def test_a_time_that_does_not_fit_is_an_error(connection: Any, schema: str) -> None:
    ends_now = TimestampedLayout(
        epoch=datetime.now(UTC) - timedelta(milliseconds=2**20 + 5000), time_bits=20
    )
    table = make(connection, schema, 5, ends_now)
    with pytest.raises(
        psycopg.errors.NumericValueOutOfRange, match=r"they end at 1048575\b"
    ) as caught:
        insert(connection, table)
    assert "later epoch" in caught.value.diag.message_hint
    assert connection.execute(f"SELECT count(*) FROM {table}").fetchone() == (0,)


def test_a_shard_that_does_not_fit_is_refused() -> None:
    with pytest.raises(InvalidID, match="8192"):
        create_function("public", 8192)


def test_an_ordinary_role_inserts(connection: Any, schema: str) -> None:
    table = make(connection, schema, 5)
    role = f"writer_{next(_numbers)}"
    for statement in (
        f"CREATE ROLE {role}",
        f"GRANT USAGE ON SCHEMA {quoted(schema)} TO {role}",
        f"GRANT SELECT, INSERT ON ALL TABLES IN SCHEMA {quoted(schema)} TO {role}",
        f"GRANT SELECT, UPDATE ON ALL SEQUENCES IN SCHEMA {quoted(schema)} TO {role}",
        f"SET ROLE {role}",
    ):
        connection.execute(statement)
    try:
        assert len(insert(connection, table, 3)) == 3
    finally:
        connection.execute("RESET ROLE")
        connection.execute(f"DROP OWNED BY {role}")
        connection.execute(f"DROP ROLE {role}")


def test_a_schema_that_is_renamed_goes_on(connection: Any, schema: str) -> None:
    table = make(connection, schema, 5)
    before = insert(connection, table)
    connection.execute(f"ALTER SCHEMA {quoted(schema)} RENAME TO moved")
    try:
        assert insert(connection, 'moved."Likes"') > before
    finally:
        connection.execute(f"ALTER SCHEMA moved RENAME TO {quoted(schema)}")


def test_again_changes_nothing_but_the_shard(connection: Any, schema: str) -> None:
    table = make(connection, schema, 5)
    step_back(connection, schema, "Likes", HOUR)
    before = insert(connection, table)
    give_ids(connection, schema, "Likes", 6)
    after = insert(connection, table)
    assert TimestampedID.from_int(after[0]).shard == 6
    assert after[0] >> 23 >= before[0] >> 23


def test_the_sequence_goes_with_its_table(connection: Any, schema: str) -> None:
    table = make(connection, schema, 5, table="t" * 63)
    insert(connection, table)
    connection.execute(f"DROP TABLE {table}")
    rows = connection.execute("SELECT 1 FROM pg_sequences WHERE schemaname = %s", [schema])
    assert rows.fetchall() == []


# ##### With Django #####


@pytest.fixture
def alias(
    postgresql: Address, connection: Any, schema: str, django_db_blocker: Any
) -> Iterator[str]:
    """A database with the table of ``Visit``, as after a migration."""
    settings = {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": "postgres",
        "OPTIONS": {"options": "-c search_path=" + quoted(schema).replace(" ", "\\ ")},
        **postgresql.django(),
    }
    connections.settings["elephant"] = ConnectionHandler(
        {"default": {}, "elephant": settings}
    ).settings["elephant"]
    with django_db_blocker.unblock():
        with connections["elephant"].schema_editor() as editor:
            editor.create_model(Visit)
        after_migrate(apps.get_app_config("photos_app"), "elephant")
        yield "elephant"
        connections["elephant"].close()
    del connections["elephant"], connections.settings["elephant"]


def test_a_model_s_id_is_its_default(alias: str) -> None:
    visits = [Visit(page="one"), Visit(page="two"), Visit(id=7, page="three")]
    for visit in visits:
        fields = [
            field for field in Visit._meta.concrete_fields if field.attname != "id" or visit.pk is None or visit.pk == 7
        ]  # fmt: skip
        ShardedQuerySet(Visit)._insert([visit], fields, (), False, alias)
    first, second = (TimestampedID.from_int(visit.pk, LAYOUT) for visit in visits[:2])
    assert first.shard == 0
    assert first.time <= second.time
    assert int(first) < int(second)
    assert visits[2].pk == 7
    stored = Visit._base_manager.using(alias).order_by("pk").values_list("pk", "page")
    assert [tuple(row) for row in stored] == [
        (7, "three"),
        (int(first), "one"),
        (int(second), "two"),
    ]


def test_many_rows_at_once_get_their_ids(alias: str) -> None:
    visits = [Visit(page=f"page {number}") for number in range(50)]
    ShardedQuerySet(Visit)._insert(visits, Visit._meta.concrete_fields, (), False, alias)
    stored = dict(Visit._base_manager.using(alias).values_list("page", "pk"))
    assert {visit.page: visit.pk for visit in visits} == stored
    assert len(set(stored.values())) == 50


def test_migrating_again_leaves_the_default(alias: str) -> None:
    def default() -> Any:
        with connections[alias].cursor() as cursor:
            cursor.execute(
                "SELECT a.xmin, pg_get_expr(d.adbin, d.adrelid) FROM pg_attrdef d"
                " JOIN pg_attribute a ON a.attrelid = d.adrelid AND a.attnum = d.adnum"
                " WHERE d.adrelid = %s::regclass",
                [Visit._meta.db_table],
            )
            return cursor.fetchall()

    before = default()
    assert function_name(LAYOUT) in before[0][1]
    after_migrate(apps.get_app_config("photos_app"), alias)
    assert default() == before


class Drawer:
    """A session that draws ids until there are enough and the server has had all its restarts.

    It connects again after a restart.
    """

    def __init__(
        self, server: PostgreSQLServer, draw: str, count: int, restarted: threading.Event
    ) -> None:
        self.ids = array("q")
        self.is_running = threading.Event()
        self.is_running.set()
        self.error: BaseException | None = None
        #: How often the session was lost.
        self.losses = 0
        self._server, self._draw, self._count = server, draw, count
        self._restarted = restarted
        self.thread = threading.Thread(target=self._work)
        self.thread.start()

    def _work(self) -> None:
        try:
            while len(self.ids) < self._count or not self._restarted.is_set():
                assert self.is_running.wait(PATIENCE)
                try:
                    self._work_until_lost()
                except psycopg.OperationalError:
                    self.losses += 1
        except BaseException as exc:
            self.error = exc

    def _work_until_lost(self) -> None:
        with closing(psycopg.connect(**self._server.address.psycopg(), autocommit=True)) as session:
            while len(self.ids) < self._count or not self._restarted.is_set():
                ((ids,),) = session.execute(self._draw).fetchall()
                drawn = array("q", ids)
                if sys.byteorder == "little":
                    drawn.byteswap()
                self.ids.extend(drawn)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["timestamped", "packed"])
def test_millions_of_ids_of_eight_sessions_with_two_restarts(
    own_postgresql: PostgreSQLServer, kind: str
) -> None:
    """All sessions draw from one table. ``TIMESTAMPED_IDS`` in the environment changes the number.

    A run of more than ten minutes needs ``-o faulthandler_timeout=0``.
    """
    server, count = own_postgresql, MILLIONS // 8
    with closing(psycopg.connect(**server.address.psycopg(), autocommit=True)) as connection:
        connection.execute(f"CREATE SCHEMA {kind}")
        make(connection, kind, 77)
        # What migrate makes of a PackedIDField: the sequence of the column begins at the first id.
        connection.execute(f"CREATE SEQUENCE {kind}.ids START {PACKED_IDS.start}")
    call = f"nextval('{kind}.ids')"
    if kind == "timestamped":
        call = f"{kind}.{quoted(function_name(LAYOUT))}('{kind}.\"Likes_ID_last\"'::regclass)"
    draw = f"SELECT string_agg(int8send({call}), '') FROM generate_series(1, {BATCH})"
    restarted = threading.Event()
    drawers = [Drawer(server, draw, count, restarted) for _ in range(8)]
    for third, end in ((1, server.kill), (2, server.stop)):
        while sum(len(drawer.ids) for drawer in drawers) < count * 8 * third // 3:
            assert drawers[0].thread.is_alive()
            drawers[0].thread.join(0.1)
        for drawer in drawers:
            drawer.is_running.clear()
        end()
        server.start()
        for drawer in drawers:
            drawer.is_running.set()
    restarted.set()
    ids = array("q")
    for drawer in drawers:
        drawer.thread.join()
        assert drawer.error is None
        assert list(drawer.ids) == sorted(drawer.ids)  # a session's ids grow, also over restarts
        ids.extend(drawer.ids)
    assert sum(drawer.losses for drawer in drawers) >= 16
    assert len(ids) >= count * 8
    assert len(set(ids)) == len(ids)
    if kind == "packed":
        assert min(ids) == PACKED_IDS.start
        assert max(ids) in PACKED_IDS
    else:
        assert {number >> 10 & 8191 for number in ids} == {77}
