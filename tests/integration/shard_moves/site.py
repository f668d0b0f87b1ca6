"""A site whose shards are moved while it works: its topology is in the global database."""

from __future__ import annotations

import json
from typing import Any

from tests.integration.imports import site as library_site
from tests.integration.moves import site as moves_site

#: Seconds between two looks of a process at the topology. Longer than any test waits, so that a
#: process learns of a move by its statements only.
POLLED = 300
_FILL_SHARDS = """
for number in range(4):
    Account.objects.bulk_create(Account(name=f"account {n}") for n in range(number * 10, number * 10 + 10))
for account in Account.objects.scatter():
    Order.objects.create(account=account, amount=len(account.name))
    Order.objects.create(account=account, amount=2).delete()
"""
#: All rows of a group, as an application sees them.
_ROWS = """
def rows(*models):
    return {
        model.__name__: sorted(map(repr, model.objects.scatter().values_list(
            *[f.attname for f in model._meta.concrete_fields])))
        for model in models
    }
"""
_PLACE = """
from sharded_orm import runtime
def place(number, group="accounts"):
    return runtime.shard(group, number).node
"""
_LEFT = """
from sharded_orm.operations.shard_moves.shard_sessions import SchemaSessions
from sharded_orm.operations.shard_moves.plan import ShardToMove
from sharded_orm.operations.nodes import node_connection
from sharded_orm import runtime
for group in ("books", "accounts"):
    for shard in runtime.group(group).shards():
        for node in sorted(runtime.topology().nodes):
            with node_connection(node) as wrapper:
                if shard.schema not in wrapper.schemas_present():
                    continue
            with SchemaSessions(ShardToMove(group, shard.number, shard.node, node, None).on(node), print) as sessions:
                names = sessions.schema._table_names()
                if names == ["sharded_orm_capture_names"] and node != shard.node:
                    continue  # A file of SQLite stays.
                own = [name for name in names if name.startswith("sharded_orm_capture_")]
                triggers = sorted(sessions.capture.triggers())
                if own or triggers or (node != shard.node and names):
                    print(shard.alias, node, own, triggers, sep=" ")
"""


class Site(library_site.Site):
    """Groups ``books`` (directory) and ``accounts`` (modulo): 0 and 1 on ``db1``, 2 and 3 on ``db2``."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        setting = self.content["sharded_orm"]
        setting["TOPOLOGY"] = {
            "SOURCE": "database",
            "OPTIONS": {"ALIAS": "default", "INTERVAL": POLLED, "TIMEOUT": 3 * POLLED},
        }
        self.lock_early()
        self._ranges = {
            name: {"RANGES": group.pop("RANGES")} for name, group in setting["GROUPS"].items()
        }
        self.save()

    def prepare(self) -> None:
        self.create_databases()
        document = {"format": 1, "version": 1, "nodes": {}, "groups": self._ranges}
        path = self.folder / "topology.json"
        path.write_text(json.dumps(document))
        self.manage("topology", "push", str(path))
        super().prepare()

    def initialize(self) -> None:
        self.prepare()
        self.fill()

    def fill(self, count: int = 0) -> None:
        self.run(moves_site._FILL + _FILL_SHARDS)

    def rows(self, *models: str) -> str:
        """What the application reads of models, on all shards."""
        return self.run(f"{_ROWS}print(rows({', '.join(models)}))")

    def state(self) -> tuple[str, str]:
        """The node of shard 0 of ``accounts``, and what the application reads, by one process."""
        code = f"{_ROWS}{_PLACE}print(place(0), rows(Account, Order), sep='\\n')"
        place, rows = self.run(code).splitlines()
        return place, rows

    def place(self, number: int, group: str = "accounts") -> str:
        """The node of a shard, by the published topology."""
        return self.run(f"{_PLACE}print(place({number}, {group!r}))")

    def move(self, *arguments: str, code: int = 0, **environment: str) -> library_site.Done:
        return self.manage("shards", "move", *arguments, code=code, **environment)

    def left(self) -> str:
        """What moves have left on the nodes: tables, triggers, and tables of shards that are elsewhere."""
        return self.run(_LEFT)
