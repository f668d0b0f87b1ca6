"""``manage.py cache_stats``: show the counters of the cache and the state of the cache servers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management import BaseCommand, CommandError
from django.core.management.base import CommandParser

from sharded_orm.cache.stores.base import ServerDown
from sharded_orm.management.tables import write_table
from sharded_orm.operations.cache import (
    CacheServerStatus,
    ModelStatistics,
    reset_statistics,
    status,
)

# Counters of problems, with their meaning. If a counter of a model is not 0, the command prints a
# line with its meaning below the table.
_TROUBLE = {
    "fills_lost": "not stored because of a write in between, or of another reader",
    "broken": "entries that could not be read",
    "too_large": "entries too large for the server",
    "refusals": "writes refused because the cache could not be told",
    "proceeded": "writes that went on without the cache; entries may have been stale",
    "repairs": "markers of dead writers closed",
}


class Command(BaseCommand):
    help = (
        "Shows the counters of all processes for each cached model, and the cache servers; exit"
        " status 1 if a server is down. Processes send their counts every ten seconds."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--json", action="store_true", help="Print one JSON object.")
        parser.add_argument(
            "--reset", action="store_true", help="Set all counters to 0, and show nothing."
        )

    def handle(self, **options: Any) -> None:
        try:
            if options["reset"]:
                reset_statistics()
                self.stdout.write("All counters begin at 0 again.")
                return
            statistics = status()
        except ServerDown as exc:
            raise CommandError(f"A cache server does not answer: {exc}") from exc
        except ImproperlyConfigured as exc:
            raise CommandError(str(exc)) from exc
        if options["json"]:
            models = [
                {**asdict(entry), "hit_ratio": entry.hit_ratio} for entry in statistics.models
            ]
            servers = [asdict(entry) for entry in statistics.servers]
            self.stdout.write(json.dumps({"models": models, "servers": servers}, indent=2))
        else:
            self._models(statistics.models)
            self.stdout.write("")
            self._servers(statistics.servers)
        if statistics.problems:
            raise CommandError("\n".join(statistics.problems))

    def _models(self, models: Sequence[ModelStatistics]) -> None:
        if not models:
            self.stdout.write("No installed model has cache = True.")
            return
        write_table(
            self,
            ("model", ">hits", ">in request", ">misses", ">hit ratio", ">bypassed", ">stored"),
            [(entry.label, *_cells(entry)) for entry in models],
        )
        for entry in models:
            for field, meaning in _TROUBLE.items():
                if entry.counts is not None and (count := entry.counts[field]):
                    self.stdout.write(f"{entry.label}: {count:,} {meaning}")

    def _servers(self, servers: Sequence[CacheServerStatus]) -> None:
        write_table(
            self,
            ("server", "holds", "version", ">items", ">bytes", ">evictions", ">ms", ""),
            [
                (entry.name, " and ".join(entry.holds), entry.version or "", _number(entry.items),
                 _number(entry.bytes), _number(entry.evictions),
                 "" if entry.round_trip_ms is None else f"{entry.round_trip_ms:.2f}",
                 "" if entry.error is None else "DOWN")
                for entry in servers
            ],
            {"DOWN"},
        )  # fmt: skip


def _cells(entry: ModelStatistics) -> tuple[str, ...]:
    counts: Mapping[str, int] | None = entry.counts
    if counts is None:
        return ("?",) * 6
    ratio = entry.hit_ratio
    return (
        f"{counts['object_hits'] + counts['list_hits']:,}",
        f"{counts['l1_hits']:,}",
        f"{counts['object_misses'] + counts['list_misses']:,}",
        "" if ratio is None else f"{ratio:.1%}",
        f"{counts['bypasses']:,}",
        f"{counts['fills']:,}",
    )


def _number(number: int | None) -> str:
    return "" if number is None else f"{number:,}"
