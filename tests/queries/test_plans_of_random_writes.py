"""Random writes by plans: the statements, rows and errors of Django's."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from django.db import connections, transaction
from django.db.models.sql.compiler import SQLInsertCompiler, SQLUpdateCompiler
from django.test.utils import CaptureQueriesContext
from hypothesis import given
from hypothesis.strategies import SearchStrategy

from tests.queries.chains import Chain, Comparison, as_many
from tests.queries.chains_of_writes import chains_of_writes, small_chains_of_writes
from tests.queries.conftest import DATABASES, ONE, SHARD, TWO
from tests.queries.test_write_plans import samples as samples  # a fixture
from tests.queries.twins import GROUP, comparable_value, rolled_back
from tests.samples.models import Sample

pytestmark = [pytest.mark.django_db(databases=DATABASES), pytest.mark.every_backend]


class Writes:
    """Runs writes and undoes them, and counts those that Django has not compiled."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._sent = self._compiled = 0
        for compiler in (SQLUpdateCompiler, SQLInsertCompiler):
            patch.setattr(compiler, "as_sql", self._counting(compiler.as_sql))

    def _counting(self, as_sql: Any) -> Any:
        def counted(*args: Any) -> Any:
            self._compiled += 1
            return as_sql(*args)

        return counted

    def planned(self) -> int:
        return self._sent - self._compiled

    def outcome(self, write: Chain) -> tuple[Any, list[str], Any]:
        """Return the result or the error of ``write``, its statements, and the rows after it."""
        value: Any
        rows: list[Any] = []
        with rolled_back():
            with CaptureQueriesContext(connections[GROUP]) as sent:
                try:
                    with transaction.atomic(using=GROUP):
                        value = _without_addresses(repr(comparable_value(write())))
                except Exception as exc:
                    is_broken = bool(connections[GROUP].needs_rollback)
                    value = (type(exc), _without_addresses(str(exc)), is_broken)
            statements = [_without_addresses(str(query["sql"])) for query in sent]
            self._sent += sum(text.startswith(("UPDATE", "INSERT")) for text in statements)
            for alias in (SHARD[ONE], SHARD[TWO]):
                with connections[alias].cursor() as cursor:
                    # Plain SQL, because SQLite may store what the ORM cannot read.
                    cursor.execute(f"SELECT * FROM {Sample._meta.db_table} ORDER BY id")
                    rows += list(map(repr, cursor.fetchall()))
        return value, [text for text in statements if "SAVEPOINT" not in text], rows


def _without_addresses(text: str) -> str:
    return re.sub(r"(?<= at )0x[0-9a-f]+", "", text)


@pytest.mark.filterwarnings("ignore:DateTimeField")
@pytest.mark.parametrize(
    ("chains", "examples"), [(small_chains_of_writes, 30), (chains_of_writes, 20)]
)
def test_random_writes(
    chains: Callable[[], SearchStrategy[list[Chain]]],
    examples: int,
    samples: None,
    pytestconfig: pytest.Config,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    writes = Writes(monkeypatch)
    compare = Comparison(writes.outcome)

    @as_many(examples, pytestconfig)
    @given(chains())
    def same(chains: list[Chain]) -> None:
        compare(chains, writes.planned)

    same()
    assert compare.share("used") > 0.1
    assert compare.share("results") > 0.2
