"""Shards on two servers, MariaDB and PostgreSQL, with the table of decisions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.apps import apps

from sharded_orm import runtime
from sharded_orm.contrib import two_phase
from sharded_orm.contrib.two_phase.apps import TwoPhaseConfig
from sharded_orm.contrib.two_phase.models import Decision
from sharded_orm.two_phase.branch_watch import watch
from tests.integration.two_phase.bank import Bank
from tests.unit.backends.group.conftest import using_nodes

VENDORS = ("mariadb", "postgresql")


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> None:
    """The app with the table of decisions, as if it were in INSTALLED_APPS."""
    config = TwoPhaseConfig(TwoPhaseConfig.name, two_phase)
    config.apps, config.models = apps, apps.all_models[config.label]
    monkeypatch.setitem(apps.app_configs, config.label, config)


def settings_of(addresses: Any) -> list[dict[str, Any]]:
    return [
        address.node()
        if hasattr(address, "node")
        else {"ENGINE": "sharded_orm.backends.mysql", **address.django()}
        for address in addresses
    ]


@pytest.fixture(params=VENDORS)
def nodes(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return settings_of(request.getfixturevalue(f"{request.param}_nodes"))


@pytest.fixture
def bank(
    nodes: list[dict[str, Any]],
    app: None,
    django_db_blocker: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Bank]:
    by_name = dict(zip(runtime.config().topology.nodes, nodes, strict=False))
    watch.__init__()  # type: ignore[misc]  # It forgets the nodes of earlier tests.
    with (
        django_db_blocker.unblock(),
        using_nodes(by_name, monkeypatch, database_name="two_phase_{shard:03d}") as topology,
    ):
        bank = Bank(topology, Decision)
        try:
            bank.open()
            yield bank
        finally:
            bank.drop()
