"""Prints the shard that it runs on, or does what its options ask for."""

from __future__ import annotations

import os
import signal
from typing import Any

from django.core.management import BaseCommand, CommandError
from django.core.management.base import CommandParser
from django.db import connections


class Command(BaseCommand):
    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--database", choices=tuple(connections), default="default")
        parser.add_argument("--fail-on", action="append", default=[])
        parser.add_argument("--how", default="error")

    def handle(self, **options: Any) -> None:
        alias = options["database"]
        with connections[alias].cursor() as cursor:
            cursor.execute("SELECT MIN(app) FROM django_migrations")
            (app,) = cursor.fetchone()
        self.stdout.write(f"{alias} has {app} in process {os.getpid()}")
        if alias in options["fail_on"]:
            print(f"about to fail on {alias}")
            match options["how"]:
                case "error":
                    raise CommandError("told to fail")
                case "exception":
                    raise ValueError("a mistake")
                case "exit":
                    raise SystemExit(3)
                case "ask":
                    input("really? ")
                case "die":
                    os.kill(os.getpid(), signal.SIGKILL)
