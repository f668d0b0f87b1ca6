"""``manage.py import_movielens DIR``: load a MovieLens folder into the shards."""

from __future__ import annotations

import time
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from django.core.management import BaseCommand, CommandError
from django.db import DatabaseError

from testproject.movielens import loader
from testproject.movielens.folder import FolderError, check
from testproject.movielens.progress import progress


class Command(BaseCommand):
    help = (
        "Loads movies.csv, ratings.csv and tags.csv of a MovieLens folder: films into the global"
        " database, ratings and tags into the shards of their users."
    )
    # Since Django 6.1, the checks of fields connect to the databases, which may not exist yet.
    requires_system_checks = ()

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "dir", type=Path, metavar="DIR", help="The folder with the three files."
        )
        parser.add_argument(
            "--replace", action="store_true", help="Delete what an earlier run has stored, first."
        )

    def handle(self, **options: Any) -> None:
        folder: Path = options["dir"]
        try:
            contents = check(folder)
        except FolderError as exc:
            raise CommandError(f"{exc}. Nothing was stored.") from exc
        strangers = contents.taggers - contents.raters
        if len(strangers) > len(contents.taggers) / 2:
            # Stored all the same: the command does not guess which of the two files is right.
            self.stderr.write(
                self.style.WARNING(
                    f"Warning: {len(strangers)} of the {len(contents.taggers)} users in tags.csv have no"
                    " ratings; the user ids of tags.csv and ratings.csv seem not to belong together."
                    " They are stored as they are."
                )
            )
        try:
            self._make_room(replace=options["replace"])
            self._load(folder, contents.total)
        except DatabaseError as exc:
            raise CommandError(
                f"{type(exc).__name__}: {exc}\nIf the databases or their tables are missing,"
                " 'manage.py demo --check' makes them; if some rows are stored already, go on with"
                " --replace."
            ) from exc

    def _make_room(self, *, replace: bool) -> None:
        if loader.is_empty():
            return
        if not replace:
            raise CommandError(
                "There are films, ratings or tags already; a second import would store them twice."
                " Use --replace to delete them first, also after an import that was interrupted."
            )
        loader.clear()
        self.stdout.write("Deleted what was there.")

    def _load(self, folder: Path, total: int) -> None:
        began = time.perf_counter()
        with progress(total, self.stderr) as update:
            loaded = list(loader.load(folder, update))
        for part in loaded:
            self.stdout.write(
                f"{part.name}: {part.rows:,} rows in {part.seconds:.2f} s,"
                f" {part.per_second:,.0f} rows/s"
            )
        seconds = time.perf_counter() - began
        self.stdout.write(
            self.style.SUCCESS(f"{total:,} rows in {seconds:.2f} s, {total / seconds:,.0f} rows/s")
        )
