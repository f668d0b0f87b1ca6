"""``manage.py cache_invalidate``: forget what is cached, after SQL by hand."""

from __future__ import annotations

from typing import Any

from django.core.exceptions import ImproperlyConfigured, ValidationError
from django.core.management import BaseCommand, CommandError
from django.core.management.base import CommandParser
from django.db import Error

from sharded_orm.operations.cache import cached_models, cached_models_on, invalidate, require_cache


class Command(BaseCommand):
    help = "Makes void what is cached, after SQL that the library did not see."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "what",
            nargs="*",
            metavar="MODEL|NAME=VALUE",
            help="Models as app_label.Model; for one model also its shard key, isolate key and pk, such"
            " as user_id=1. A text key with a '=' in its value is fine.",
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
            for found in cached_models_on(using) if every else cached_models(labels):
                invalidate(found, where, using)
                if options["verbosity"]:
                    pairs_given = " ".join(part for part in options["what"] if "=" in part)
                    told = pairs_given or "everything"
                    self.stdout.write(f"{found.model._meta.label}: {told} is void.")
        except (
            LookupError, TypeError, ValueError, ValidationError, ImproperlyConfigured, Error,
        ) as exc:  # fmt: skip
            raise CommandError(str(exc)) from exc
