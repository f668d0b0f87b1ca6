"""One thread that uses every one of 4096 shards; run by ``test_many_shards``.

Prints the connections and memory that it keeps as JSON. It is a process of its own, because a
test process never drops a connection that a test may still use.
"""

from __future__ import annotations

import gc
import json
import sys
import time
import tracemalloc

from django.conf import settings

SHARDS, LIMIT = 4096, 200


def main(folder: str) -> None:
    from sharded_orm.topology.aliases import sharded_databases

    node = {"ENGINE": "sharded_orm.backends.sqlite3", "NAME": folder}
    settings.configure(
        INSTALLED_APPS=["sharded_orm"],
        DATABASES=sharded_databases(
            {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}
        ),
        DATABASE_ROUTERS=["sharded_orm.routers.ShardRouter"],
        SHARDED_ORM={
            "NODES": {"local": node},
            "GROUPS": {
                "fleet": {
                    "STRATEGY": "modulo",
                    "RANGES": [{"range": (0, SHARDS - 1), "primary": "local"}],
                }
            },
            "MAX_IDLE_ALIASES": LIMIT,
        },
    )
    import django

    django.setup()
    from django.core.checks import run_checks
    from django.db import connections, transaction
    from django.db.utils import ConnectionHandler

    def touch(numbers: range) -> None:
        for number in numbers:
            connections[f"fleet_{number:05d}"]

    def aliases_of_checks() -> tuple[list[str], float]:
        """The aliases that ``run_checks()`` looks up, and its seconds."""
        looked_up: list[str] = []
        look_up = ConnectionHandler.__getitem__

        def note(self: ConnectionHandler, alias: str) -> object:
            looked_up.append(alias)
            return look_up(self, alias)

        ConnectionHandler.__getitem__ = note  # type: ignore[method-assign,assignment]
        try:
            began = time.perf_counter()
            run_checks()
            return sorted(set(looked_up)), time.perf_counter() - began
        finally:
            ConnectionHandler.__getitem__ = look_up  # type: ignore[method-assign]

    checked, check_seconds = aliases_of_checks()
    tracemalloc.start()
    touch(range(SHARDS))
    gc.collect()
    once, _ = tracemalloc.get_traced_memory()
    touch(range(SHARDS))
    gc.collect()
    twice, _ = tracemalloc.get_traced_memory()

    held = connections["fleet_00001"]
    held.create_shard_database()
    with transaction.atomic(using="fleet_00001"):
        touch(range(2, SHARDS))
        in_transaction_kept = connections["fleet_00001"] is held
    group = connections["fleet"]
    sys.stdout.write(
        json.dumps(
            {
                "checked": checked,
                "check_seconds": check_seconds,
                "kept": len(group.shards.wrappers),
                "iterated": len(list(connections)),
                "once": once,
                "grown": twice - once,
                "in_transaction_kept": in_transaction_kept,
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1])
