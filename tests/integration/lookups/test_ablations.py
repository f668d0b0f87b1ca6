"""The comparison with one database notices each part of the lookups that is left out."""

from __future__ import annotations

from typing import Any

import pytest

from sharded_orm.contrib.lookups import entries, reservation, row_changes
from sharded_orm.contrib.lookups.transaction import EntryChange, TransactionEntries
from sharded_orm.models.querysets.reads import ReadingQuerySet
from tests.integration.lookups.test_twins import run_seed
from tests.queries.conftest import DATABASES

pytestmark = [pytest.mark.long, pytest.mark.django_db(databases=DATABASES, transaction=True)]


def _forget(*args: Any, **kwargs: Any) -> None:
    return None


def _remove_at_once(watcher: Any, change: EntryChange, old: Any) -> None:
    if old:
        entries.mark(old, change.old, watcher.writer)
        entries.remove(entries.GLOBAL_TABLE, [change.old])


def _believe(rows: Any, read: Any) -> Any:
    rows._may_guess = True
    try:
        return read()
    finally:
        rows._may_guess = False


ABLATIONS = {
    "entries are not given back": (
        EntryChange,
        "surplus",
        lambda self, stands: [self.old] if stands else [],
    ),
    "entries of old values stay": (
        EntryChange,
        "surplus",
        lambda self, stands: [] if stands else [self.fresh],
    ),
    "entries of old values are removed before the commit": (row_changes, "_mark", _remove_at_once),
    "rollbacks to savepoints are not noticed": (
        TransactionEntries,
        "savepoint_rolled_back",
        _forget,
    ),
    "values are not reserved": (reservation, "_take_over_if_free", _forget),
    "rows of the same value are not looked for": (reservation, "has_row", lambda *args: False),
    "remembered keys are believed": (
        ReadingQuerySet,
        "_proved",
        lambda self, read: _believe(self, read),
    ),
    "updates are not followed": (
        row_changes.RowFollower,
        "_update",
        lambda self, compiler, execute: execute(),
    ),
}


@pytest.mark.parametrize("name", ABLATIONS)
def test_an_ablation_is_noticed(accounts: Any, monkeypatch: Any, name: str) -> None:
    for account in accounts:
        account.delete()
    owner, attribute, replacement = ABLATIONS[name]
    monkeypatch.setattr(owner, attribute, replacement)
    with pytest.raises(AssertionError):
        for seed in range(10):
            blocks, refused = run_seed(seed, 120)
            assert refused < blocks / 3
