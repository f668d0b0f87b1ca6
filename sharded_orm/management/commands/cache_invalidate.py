"""``manage.py cache_invalidate``: invalidate entries of the cache, after another program has
changed rows without the library.
"""

from __future__ import annotations

from typing import Any

from django.core.exceptions import ImproperlyConfigured, ValidationError
from django.core.management import BaseCommand, CommandError
from django.core.management.base import CommandParser
from django.db import Error

from sharded_orm.management.error_text import error_text
from sharded_orm.operations.cache import cached_models, cached_models_on, invalidate, require_cache


class Command(BaseCommand):
    help = "Invalidates cached rows, after SQL that the library did not see."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "what",
            nargs="*",
            metavar="MODEL|NAME=VALUE",
            help="Models as app_label.Model. For a single model also its shard key, isolate key and pk,"
            " such as user_id=1. The value of a text key may contain '='.",
        )
        parser.add_argument("--all", action="store_true", help="All cached models.")
        parser.add_argument("--using", metavar="ALIAS", help="Only the rows of this shard.")

    def handle(self, **options: Any) -> None:
        labels = [part for part in options["what"] if "=" not in part]
        pairs = [part.partition("=") for part in options["what"] if "=" in part]
        where = {name: value for name, _, value in pairs}
        if options["all"] == bool(labels):
            raise CommandError("Name models, or use --all.")
        if where and len(labels) != 1:
            raise CommandError("Keys belong to one model: name one.")
        try:
            require_cache()
            using = options["using"]
            every = options["all"] and using is not None
            for cached in cached_models_on(using) if every else cached_models(labels):
                invalidate(cached, where, using)
                if options["verbosity"]:
                    pairs_given = " ".join(part for part in options["what"] if "=" in part)
                    rows = pairs_given or "everything"
                    self.stdout.write(f"{cached.model._meta.label}: {rows} is void.")
        except (
            LookupError, TypeError, ValueError, ValidationError, ImproperlyConfigured, Error,
        ) as exc:  # fmt: skip
            raise CommandError(error_text(exc)) from exc
