"""A site on two servers that replicate from each other, and the commands of its operator."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.integration.promotion.site import Done, Site
from tests.services.replication import LoggingServer, MasterPair, execute

#: Half of the shards are active on each server.
ACTIVE = {0: "db1", 1: "db1", 2: "db2", 3: "db2"}
SCHEMAS = [f"photos_{number:05d}" for number in ACTIVE]


def _groups() -> dict[str, Any]:
    ranges = [
        {"range": [0, 1], "pair": ["db1", "db2"], "active": "db1"},
        {"range": [2, 3], "pair": ["db1", "db2"], "active": "db2"},
    ]
    return {"photos": {"STRATEGY": "modulo", "RANGES": ranges}}


def directory_groups() -> dict[str, Any]:
    """Return groups to which shards can be added."""
    return {"photos": {**_groups()["photos"], "STRATEGY": "directory"}}


@dataclass
class PairSite(Site):
    """``db1`` and ``db2`` are a pair; shards 0 and 1 are active on db1, shards 2 and 3 on db2."""

    pair: MasterPair
    groups: dict[str, Any] = field(default_factory=_groups)

    def server(self, node: str) -> LoggingServer:
        return self.pair.first if node == "db1" else self.pair.second

    def create_databases(self) -> None:
        self.pair.reset("photos_")
        self._create_default()
        for schema, node in zip(SCHEMAS, ACTIVE.values(), strict=True):
            execute(self.server(node), f"CREATE DATABASE {schema}")
            execute(
                self.server(node),
                f"CREATE TABLE {schema}.entries_entry"
                " (entry_id BIGINT PRIMARY KEY, user_id BIGINT NOT NULL)",
            )
        self.pair.settle()

    def pairs(self, *arguments: str, code: int = 0) -> Done:
        """Run ``manage.py pairs …``; it must exit with the status ``code``."""
        done = self.manage("pairs", *arguments)
        assert done.code == code, f"{done.code}\n{done.out}\n{done.err}"
        return done


@dataclass
class RollingSite(PairSite):
    """A site whose shards have albums in the schema of the old release. ``migrate_shards`` has fenced them."""

    apps: list[str] = field(default_factory=lambda: ["tests.integration.pairs.albums"])

    def create_databases(self) -> None:
        self.pair.reset("photos_")
        self._create_default()
        for arguments in (("--create", "entries"), ("albums", "0001")):
            done = self.manage("migrate_shards", *arguments)
            assert done.code == 0, done.err
        self.pair.settle()

    def rolling(self, *arguments: str, code: int = 0, **environment: str) -> Done:
        """Run ``migrate_shards --rolling`` to the new schema; it must exit with the status ``code``."""
        done = self.manage(
            "migrate_shards", "albums", "0003", "--rolling", *arguments, **environment
        )
        assert done.code == code, f"{done.code}\n{done.out}\n{done.err}"
        return done

    def active(self) -> list[str]:
        """Return the active side of each shard, by the published topology."""
        sides = []
        for entry in self.document()["groups"]["photos"]["RANGES"]:
            first, last = entry["range"]
            sides += [entry["active"]] * (last + 1 - first)
        return sides
