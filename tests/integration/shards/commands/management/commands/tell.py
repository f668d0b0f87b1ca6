"""Prints its arguments and uses no database."""

from __future__ import annotations

from typing import Any

from django.core.management import BaseCommand
from django.core.management.base import CommandParser


class Command(BaseCommand):
    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("words", nargs="*")

    def handle(self, **options: Any) -> None:
        self.stdout.write(" ".join(options["words"]))
