"""Rows of two keys on two shards, and what the lookups say about them."""

from __future__ import annotations

from typing import Any

import pytest

from sharded_orm import runtime
from sharded_orm.autonomous_connections import AutonomousConnections
from sharded_orm.contrib.lookups import maintenance
from sharded_orm.contrib.lookups.models import LookupEntry
from tests.finders.models import Account
from tests.integration.imports.site import site_fixture
from tests.integration.lookups.site import Site
from tests.queries.conftest import ONE, SHARD, TWO

site = site_fixture(Site)


@pytest.fixture
def accounts(db: None) -> Any:
    """Two accounts, of ONE on shard 3 and of TWO on shard 12."""
    store: Any = runtime.strategy("photos").store  # type: ignore[attr-defined]
    store.place("photos", {str(key): int(alias[-5:]) for key, alias in SHARD.items()})
    yield (
        Account.objects.create(id=1, user_id=ONE, email="ada@x", serial=7),
        Account.objects.create(id=2, user_id=TWO, email="bob@x", serial=7),
    )
    AutonomousConnections.close_all()


def differences() -> dict[str, tuple[int, int, int]]:
    """Missing, superfluous and duplicate entries of each lookup that has any."""
    checked = map(maintenance.check, maintenance.selected(()))
    return {
        each.lookup: (each.missing, each.surplus, each.duplicates)
        for each in checked
        if not each.is_clean
    }


def entries(field: str) -> list[tuple[str, str]]:
    """Value and key of each entry of a lookup of accounts."""
    stored = LookupEntry.objects.filter(lookup=f"finders.account.{field}")
    return sorted(stored.values_list("value", "key"))
