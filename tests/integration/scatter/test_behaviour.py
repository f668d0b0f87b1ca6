"""Statements, transactions, failures and subqueries of a scatter."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from django.db import DatabaseError, connections, transaction
from django.db.models import Count, Exists, F, OuterRef, Subquery
from django.db.models.query import ModelIterable
from django.test import TestCase

from sharded_orm import runtime, scatter
from sharded_orm.backends.features import features_of
from sharded_orm.exceptions import ScatterError, ScatterNotSupported
from sharded_orm.models.text_keys import guard
from sharded_orm.scatter import first_rows
from tests.integration.scatter.conftest import (
    SHARDS,
    fetch,
    insert,
    one_database,
    store,
    targets,
)
from tests.queries.conftest import DATABASES
from tests.samples.models import Handle, Part, Sample

pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.django_db(databases=DATABASES, transaction=True),
]

statements = TestCase().assertNumQueries


@pytest.fixture
def rows() -> None:
    store(
        [Sample(id=n, owner=n % 5, number=n % 3, name=f"n{n}") for n in range(20)],
        [Part(id=n, owner=n % 5, sample_id=n, weight=n) for n in range(20)],
    )


def per_scatter(unions: int) -> int:
    """Return the number of statements of one phase: one union, or one statement per shard."""
    return unions if connections["photos_00000"].features.can_union_shards else len(SHARDS)


def test_one_statement_per_node(rows: None) -> None:
    queryset = one_database(Sample).order_by("id")
    with statements(per_scatter(2), using="photos"):
        assert len(fetch(queryset)) == 20
    with statements(per_scatter(2), using="photos"):
        assert scatter.count(queryset, targets(queryset)) == 20
    with statements(per_scatter(2), using="photos"):
        scatter.aggregate(queryset, targets(queryset), {"n": Count("id")})


@pytest.mark.parametrize("stream", [False, True])
def test_statements_name_a_limited_number_of_tables(
    rows: None, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each table that a statement of PostgreSQL names takes memory of the server."""
    monkeypatch.setattr(features_of(connections["photos_00000"]), "max_scattered_tables", 2)
    one, two = one_database(Sample), one_database(Part).filter(sample__number=1)
    # Three shards are on one node and two on the other.
    for queryset, unions in (one, 3), (two, 5):
        expected = list(queryset.order_by("id"))
        with statements(per_scatter(unions), using="photos"):
            assert fetch(queryset.order_by("id"), stream=stream) == expected


def test_two_phases(rows: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_rows, "MIN_CANDIDATES", 0)
    queryset = one_database(Sample).order_by("-id")[:3]
    expected = list(queryset)
    with statements(per_scatter(4), using="photos"):
        assert fetch(queryset) == expected


def test_two_phases_of_a_page_behind_many_rows(rows: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_rows, "MIN_CANDIDATES", 0)
    monkeypatch.setattr(first_rows, "MAX_WINNERS", 5)
    for queryset, asked in (
        (one_database(Sample).order_by("-id")[8:13], 4),
        (one_database(Sample).order_by("-id")[8:14], 2),
    ):
        expected = list(queryset)
        with statements(per_scatter(asked), using="photos"):
            assert fetch(queryset) == expected


def test_a_winner_gone_between_the_phases_is_replaced(
    rows: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_rows, "MIN_CANDIDATES", 0)
    if not connections["photos_00000"].features.can_union_shards:
        pytest.skip("one phase on this backend")
    plan = first_rows.make_plan

    def late(targets: Any, options: Any, failures: Any, **how: Any) -> Any:
        if options.by_key is not None:
            with connections["photos_00009"].cursor() as cursor:
                cursor.execute("DELETE FROM samples_sample WHERE id = 19")
        return plan(targets, options, failures, **how)

    monkeypatch.setattr(first_rows, "make_plan", late)
    Part.objects.using("photos_00009").filter(sample_id=19)._raw_delete("photos_00009")
    found = fetch(one_database(Sample).order_by("-id")[:3])
    assert [row.pk for row in found] == [18, 17, 16]


def test_rows_of_an_open_transaction_are_seen(rows: None) -> None:
    with transaction.atomic(using="photos_00000"):
        insert([Sample(id=100, owner=0)], "photos_00000")
        found = fetch(one_database(Sample).order_by("-id")[:2])
        assert [row.pk for row in found] == [100, 19]
        queryset = one_database(Sample)
        assert scatter.count(queryset, targets(queryset)) == 21
        transaction.set_rollback(True, using="photos_00000")
    assert [row.pk for row in fetch(one_database(Sample).order_by("-id")[:2])] == [19, 18]


def test_subqueries_stay_on_the_shard(rows: None) -> None:
    part = Part.objects.filter(sample=OuterRef("pk"))
    for queryset in (
        one_database(Sample).filter(Exists(part.filter(weight__gt=7))).order_by("id"),
        one_database(Sample).annotate(w=Subquery(part.values("weight")[:1])).order_by("-w"),
        one_database(Sample)
        .filter(pk__in=Part.objects.filter(weight__lt=4).values("sample"))
        .order_by("id"),
        one_database(Sample).filter(parts__weight__gt=F("number")).order_by("id"),
        one_database(Sample).exclude(parts__weight__gt=3).order_by("id"),
    ):
        assert [row.pk for row in fetch(queryset)] == [row.pk for row in queryset]
        first = queryset.all()[:2]
        assert [row.pk for row in fetch(first)] == [row.pk for row in first]


@pytest.fixture
def broken(rows: None) -> Any:
    """Shard 8 without its table."""
    table = Sample._meta.db_table
    connection = connections["photos_00008"]
    with connection.cursor() as cursor:
        cursor.execute(f"ALTER TABLE {table} RENAME TO {table}_gone")
    yield "photos_00008"
    with connection.cursor() as cursor:
        cursor.execute(f"ALTER TABLE {table}_gone RENAME TO {table}")


READS: list[Callable[..., Any]] = [
    lambda q, **how: list(scatter.fetch(q, targets(q), **how)),
    lambda q, **how: list(scatter.fetch(q.order_by("id")[:30], targets(q.order_by("id")[:30]), **how)),
    lambda q, **how: scatter.count(q, targets(q), **how),
    lambda q, **how: scatter.aggregate(q, targets(q), {"n": Count("id")}, **how),
]  # fmt: skip


@pytest.mark.parametrize("read", READS)
def test_a_shard_that_fails_is_named(broken: str, read: Callable[..., Any]) -> None:
    with pytest.raises(ScatterError, match="1 of 5 shards") as raised:
        read(one_database(Sample))
    assert list(raised.value.failures) == [broken]


@pytest.mark.parametrize("read", READS)
def test_partial_results_report_it(broken: str, read: Callable[..., Any]) -> None:
    reports: list[ScatterError] = []
    found = read(one_database(Sample), partial=True, on_failure=reports.append)
    found = len(found) if isinstance(found, list) else found
    assert found in (16, {"n": 16})
    assert [list(report.failures) for report in reports] == [[broken]]


def test_all_shards_fail(rows: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sample._meta, "db_table", "no_such_table")
    queryset = one_database(Sample).order_by("owner")
    queryset.query.alias_map.clear()
    with pytest.raises(ScatterError):
        fetch(queryset)


ERRORS_OF_QUERIES: dict[str, tuple[Any, str]] = {
    "mysql": (F("id") - 2**63 + 10 - 2**63, "out of range"),
    "postgresql": (F("id") / 0, "division by zero"),
}


def test_an_error_of_the_query_stays_itself(rows: None) -> None:
    vendor = connections["photos_00000"].vendor
    if vendor not in ERRORS_OF_QUERIES:
        pytest.skip("SQLite has no such error")
    wrong, message = ERRORS_OF_QUERIES[vendor]
    with pytest.raises(DatabaseError, match=message) as raised:
        fetch(one_database(Sample).annotate(x=wrong).order_by("id"))
    assert not isinstance(raised.value, ScatterError)


def test_an_iterable_that_reads_ahead_is_refused(rows: None) -> None:
    class Ahead(ModelIterable):
        def __iter__(self) -> Any:
            return iter(list(super().__iter__()))

    queryset = one_database(Sample).order_by("id")
    queryset._iterable_class = Ahead
    with pytest.raises(ScatterNotSupported):
        fetch(queryset)


def test_nothing_is_asked(rows: None) -> None:
    queryset = one_database(Sample)
    with statements(0, using="photos"):
        assert list(scatter.fetch(queryset, [])) == []
        assert scatter.count(queryset, []) == 0
        assert scatter.exists(queryset, []) is False
        assert scatter.aggregate(queryset, [], {"n": Count("id")}) == {"n": 0}
        assert fetch(queryset.filter(pk__in=[])) == []


def test_abandoned_streams_leave_nothing_open(rows: None) -> None:
    queryset = one_database(Sample).order_by("id")
    stream = scatter.fetch(queryset, targets(queryset), chunk_size=1)
    assert next(stream).pk == 0
    stream.close()  # type: ignore[attr-defined]
    for number in SHARDS:
        assert connections[f"photos_{number:05d}"].is_idle()


def test_streams_give_the_same_rows(rows: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for batch in (1, 1024):
        monkeypatch.setattr("sharded_orm.scatter.api.STREAM_BATCH", batch)
        for order in ("number", "id"), ():
            queryset = one_database(Sample).order_by(*order)
            found = fetch(queryset, stream=True, chunk_size=2)
            assert len(found) == 20
            assert not order or found == list(queryset)


def test_streams_are_read_as_they_are_asked_for(rows: None) -> None:
    wrapper = connections["photos_00000"]
    if not wrapper.features.can_union_shards:
        pytest.skip("its streams are cursors of the shards")
    queryset = one_database(Sample).order_by("id")
    closed, idle = wrapper.node_pool.stats.closed, wrapper.node_pool.idle
    stream = scatter.fetch(queryset, targets(queryset), stream=True, chunk_size=1)
    assert next(stream).pk == 0
    assert wrapper.node_pool.idle < idle
    stream.close()  # type: ignore[attr-defined]
    # A session of MariaDB with pending rows is gone. PostgreSQL forgets the rows with their transaction.
    # The next statements are not confused.
    if wrapper.vendor == "mysql":
        assert wrapper.node_pool.stats.closed > closed
    else:
        assert wrapper.node_pool.idle == idle
    assert len(fetch(queryset)) == 20


@pytest.mark.parametrize("partial", [False, True])
def test_a_stream_names_a_shard_that_fails(broken: str, partial: bool) -> None:
    queryset = one_database(Sample).order_by("id")
    reports: list[ScatterError] = []
    if not partial:
        with pytest.raises(ScatterError):
            fetch(queryset, stream=True)
        return
    found = fetch(queryset, stream=True, partial=True, on_failure=reports.append)
    assert [row.pk for row in found] == [n for n in range(20) if n % 5 != 3]
    assert [list(report.failures) for report in reports] == [[broken]]


@pytest.fixture
def server(rows: None) -> None:
    if connections["photos_00000"].vendor == "sqlite":
        pytest.skip("about the sessions of a server")


IDLE_SESSIONS = {
    "mysql": "SELECT CONCAT('KILL ', id) FROM information_schema.processlist"
    " WHERE id <> CONNECTION_ID() AND command = 'Sleep'",
    "postgresql": "SELECT 'SELECT pg_terminate_backend(' || pid || ')' FROM pg_stat_activity"
    " WHERE pid <> pg_backend_pid() AND datname = current_database() AND state = 'idle'",
}


def test_sessions_killed_while_idle_are_replaced(server: None) -> None:
    queryset = one_database(Sample).order_by("id")
    expected = fetch(queryset)
    for alias in ("photos_00000", "photos_00008"):
        with connections[alias].node_cursor() as cursor:
            cursor.execute(IDLE_SESSIONS[connections[alias].vendor])
            for (kill,) in cursor.fetchall():
                cursor.execute(kill)
    assert fetch(queryset) == expected
    assert fetch(queryset.all()[:3]) == expected[:3]


@pytest.fixture
def node_down(server: None) -> Iterator[None]:
    """Make the second node unreachable."""
    found = runtime.topology()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        nobody = probe.getsockname()[1]
    aliases = [f"photos_{number:05d}" for number in SHARDS if number >= 8]

    def forget() -> None:
        for alias in aliases:
            connections[alias].close()
            del connections[alias]

    forget()
    nodes = {**found.nodes, "db2": {**found.nodes["db2"], "HOST": "127.0.0.1", "PORT": nobody}}
    runtime.swap(replace(found, nodes=nodes))
    yield
    forget()
    runtime.swap(found)


def test_a_node_that_is_down(node_down: None) -> None:
    queryset = one_database(Sample).order_by("id")
    with pytest.raises(ScatterError, match="2 of 5 shards") as raised:
        fetch(queryset)
    assert list(raised.value.failures) == ["photos_00008", "photos_00009"]
    assert raised.value.__cause__ is not None
    reports: list[ScatterError] = []
    page = queryset.all()[:2]
    found = fetch(page, partial=True, on_failure=reports.append)
    assert [row.pk for row in found] == [0, 1]
    (report,) = reports
    assert set(report.failures) == {"photos_00008", "photos_00009"}


def test_a_node_that_is_down_before_its_keys_were_looked_at(node_down: None) -> None:
    guard.forget()
    handles = Handle.objects.scatter(partial=True)
    assert list(handles) == []
    assert set(handles.failed_shards) == {f"photos_{number:05d}" for number in range(8, 16)}
    with pytest.raises(ScatterError, match="8 of 16 shards"):
        list(Handle.objects.scatter())
