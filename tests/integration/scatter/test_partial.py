"""``partial=True`` may leave out shards that are down or not migrated, but hides no wrong query."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.db import OperationalError, ProgrammingError, connections
from django.db.models import Count, F, FloatField, Func

from sharded_orm import scatter
from sharded_orm.exceptions import ScatterError
from sharded_orm.scatter import Target, first_rows
from tests.integration.scatter.conftest import SHARDS, one_database, store, targets
from tests.queries.conftest import DATABASES
from tests.samples.models import Sample

pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.django_db(databases=DATABASES, transaction=True),
]

ALIASES = [f"photos_{number:05d}" for number in SHARDS]
Read = Callable[..., Any]
READS: dict[str, Read] = {
    "rows": lambda q, asked, **how: list(scatter.fetch(q, asked(q), **how)),
    "stream": lambda q, asked, **how: list(scatter.fetch(q, asked(q), stream=True, **how)),
    "in order": lambda q, asked, **how: list(scatter.fetch(q := q.order_by("id"), asked(q), **how)),
    "page": lambda q, asked, **how: list(
        scatter.fetch(q := q.order_by("id")[:30], asked(q), **how)
    ),
    "distinct": lambda q, asked, **how: list(
        scatter.fetch(q := q.values("id").distinct(), asked(q), **how)
    ),
    "groups": lambda q, asked, **how: list(
        scatter.fetch(q := q.values("owner").annotate(n=Count("id")), asked(q), **how)
    ),
    "count": lambda q, asked, **how: scatter.count(q, asked(q), **how),
    "exists": lambda q, asked, **how: scatter.exists(
        q.filter(number=-1), asked(q.filter(number=-1)), **how
    ),
    "aggregate": lambda q, asked, **how: scatter.aggregate(q, asked(q), {"n": Count("id")}, **how),
    "distinct aggregate": lambda q, asked, **how: scatter.aggregate(
        q, asked(q), {"n": Count("name", distinct=True)}, **how
    ),
}
every_read = pytest.mark.parametrize("read", READS.values(), ids=READS)


@pytest.fixture(autouse=True)
def rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_rows, "MIN_CANDIDATES", 0)
    store([Sample(id=n, owner=n % 5, number=n % 3, name=f"n{n}") for n in range(20)])


@pytest.fixture
def rename(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Any, str, str], None]]:
    """Give a table or a column a name that no database has."""

    def forget() -> None:
        for field in Sample._meta.concrete_fields:
            field.__dict__.pop("cached_col", None)

    def rename(named: Any, attribute: str, name: str) -> None:
        monkeypatch.setattr(named, attribute, name)
        forget()

    yield rename
    monkeypatch.undo()
    forget()


def without(alias: str, table: str) -> Iterator[None]:
    with connections[alias].cursor() as cursor:
        cursor.execute(f"ALTER TABLE {table} RENAME TO {table}_gone")
    yield
    with connections[alias].cursor() as cursor:
        cursor.execute(f"ALTER TABLE {table}_gone RENAME TO {table}")


@pytest.fixture
def unmigrated() -> Iterator[str]:
    """The second shard without its table."""
    yield from (ALIASES[1] for _ in without(ALIASES[1], Sample._meta.db_table))


@every_read
def test_a_table_that_no_shard_has(read: Read, rename: Callable[..., None]) -> None:
    rename(Sample._meta, "db_table", "no_such_table")
    with pytest.raises(ScatterError, match="no_such_table") as raised:
        read(one_database(Sample), targets, partial=True)
    assert set(raised.value.failures) == set(ALIASES)
    assert "may be the query" in str(raised.value)
    assert raised.value.__cause__ is not None


@pytest.mark.parametrize("name", ["rows", "stream", "in order", "page"])
def test_a_column_that_no_shard_has(name: str, rename: Callable[..., None]) -> None:
    # A page that is read in two phases selects this column only in the second one.
    rename(Sample._meta.get_field("name"), "column", "no_such_column")
    with pytest.raises(ScatterError, match="no_such_column"):
        READS[name](one_database(Sample), targets, partial=True)


@every_read
def test_a_function_that_no_shard_has(read: Read) -> None:
    wrong = one_database(Sample).filter(
        id=Func(F("id"), function="NO_SUCH", output_field=FloatField())
    )
    for partial in (False, True):
        with pytest.raises(
            (OperationalError, ProgrammingError),
            match=r"(?i)no_such.* does not exist|no such function",
        ) as raised:
            read(wrong, targets, partial=partial)
        assert not isinstance(raised.value, ScatterError)


@every_read
def test_one_shard_that_was_not_migrated(read: Read, unmigrated: str) -> None:
    reports: list[ScatterError] = []
    read(one_database(Sample), targets, partial=True, on_failure=reports.append)
    assert [list(report.failures) for report in reports] == [[unmigrated]]


@every_read
def test_the_only_shard_was_not_migrated(read: Read, unmigrated: str) -> None:
    def alone(queryset: Any) -> list[Target]:
        return [target for target in targets(queryset) if target.shard.alias == unmigrated]

    with pytest.raises(ScatterError, match=unmigrated):
        read(one_database(Sample), alone, partial=True)


@pytest.fixture
def files() -> None:
    if connections[ALIASES[0]].vendor != "sqlite":
        pytest.skip("about files")


def file_of(alias: str) -> Path:
    connections[alias].close()
    return Path(connections[alias].settings_dict["NAME"])


@every_read
def test_files_that_are_no_databases(files: None, read: Read) -> None:
    spoilt = {file_of(alias): alias for alias in ALIASES[1:]}
    kept = {path: path.read_bytes() for path in spoilt}
    try:
        for path in spoilt:
            path.write_bytes(b"nothing that SQLite knows" * 1000)
        reports: list[ScatterError] = []
        read(one_database(Sample), targets, partial=True, on_failure=reports.append)
        assert [set(report.failures) for report in reports] == [set(spoilt.values())]
    finally:
        for path, content in kept.items():
            file_of(spoilt[path]).write_bytes(content)


def test_files_that_are_not_there(files: None, tmp_path: Path) -> None:
    paths = [file_of(alias) for alias in ALIASES[1:]]
    for path in paths:
        path.rename(tmp_path / path.name)
    try:
        reports: list[ScatterError] = []
        found = READS["rows"](
            one_database(Sample), targets, partial=True, on_failure=reports.append
        )
        assert {row.owner for row in found} == {0}
        assert [set(report.failures) for report in reports] == [set(ALIASES[1:])]
    finally:
        for path in paths:
            (tmp_path / path.name).rename(path)
