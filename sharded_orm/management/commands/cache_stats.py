"""``manage.py cache_stats``: what the cache did, and how its servers are."""

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

# Of the counters, those that tell of trouble; shown as lines of their own where they are not 0.
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
        "Shows what was counted for each cached model by all processes, and the cache servers;"
        " status 1 when one is down. Processes send their counts every ten seconds."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--json", action="store_true", help="Print one JSON object.")
        parser.add_argument(
            "--reset", action="store_true", help="Show nothing; let all counters begin at 0 again."
        )

    def handle(self, **options: Any) -> None:
        try:
            if options["reset"]:
                reset_statistics()
                self.stdout.write("All counters begin at 0 again.")
                return
            told = status()
        except ServerDown as exc:
            raise CommandError(f"A cache server does not answer: {exc}") from exc
        except ImproperlyConfigured as exc:
            raise CommandError(str(exc)) from exc
        if options["json"]:
            models = [{**asdict(one), "hit_ratio": one.hit_ratio} for one in told.models]
            servers = [asdict(one) for one in told.servers]
            self.stdout.write(json.dumps({"models": models, "servers": servers}, indent=2))
        else:
            self._models(told.models)
            self.stdout.write("")
            self._servers(told.servers)
        if told.problems:
            raise CommandError("\n".join(told.problems))

    def _models(self, models: Sequence[ModelStatistics]) -> None:
        if not models:
            self.stdout.write("No installed model has cache = True.")
            return
        write_table(
            self,
            ("model", ">hits", ">in request", ">misses", ">hit ratio", ">bypassed", ">stored"),
            [(one.label, *_cells(one)) for one in models],
        )
        for one in models:
            for field, meaning in _TROUBLE.items():
                if one.counts is not None and (count := one.counts[field]):
                    self.stdout.write(f"{one.label}: {count:,} {meaning}")

    def _servers(self, servers: Sequence[CacheServerStatus]) -> None:
        write_table(
            self,
            ("server", "holds", "version", ">items", ">bytes", ">evictions", ">ms", ""),
            [
                (one.name, " and ".join(one.holds), one.version or "", _number(one.items),
                 _number(one.bytes), _number(one.evictions),
                 "" if one.round_trip_ms is None else f"{one.round_trip_ms:.2f}",
                 "" if one.error is None else "DOWN")
                for one in servers
            ],
            {"DOWN"},
        )  # fmt: skip


def _cells(one: ModelStatistics) -> tuple[str, ...]:
    counts: Mapping[str, int] | None = one.counts
    if counts is None:
        return ("?",) * 6
    ratio = one.hit_ratio
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
