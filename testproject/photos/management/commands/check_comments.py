"""``manage.py check_comments``: compares the two copies of each comment."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management import BaseCommand, CommandError

from testproject.photos.comments import check


class Command(BaseCommand):
    help = (
        "Compares the comments of each photo with the copies that their authors have. They differ"
        " where a process died between its two commits, or one side was changed alone."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--repair",
            action="store_true",
            help="Make the copies what the comments are. Without it, status 1 if they differ.",
        )

    def handle(self, *, repair: bool, **options: Any) -> None:
        differences = 0
        for difference in check(repair=repair):
            differences += 1
            self.stdout.write(f"{difference}{': repaired' if repair else ''}")
        if differences and not repair:
            raise CommandError(f"{differences} differences; --repair makes the copies anew.")
        if not differences:
            self.stdout.write(self.style.SUCCESS("Both sides of all comments agree."))
