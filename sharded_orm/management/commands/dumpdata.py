"""``manage.py dumpdata``: Django's command. It also dumps the rows of sharded models."""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any

from django.apps import apps
from django.core import serializers
from django.core.exceptions import ValidationError
from django.core.management import CommandError
from django.core.management.base import CommandParser
from django.core.management.commands import dumpdata
from django.core.management.utils import parse_apps_and_model_labels
from django.db import DEFAULT_DB_ALIAS, models, router

from sharded_orm import runtime
from sharded_orm.management.database_option import make_optional
from sharded_orm.models.querysets.sharded import ShardedQuerySet
from sharded_orm.models.sharding.options import ShardOptions, group_of, shard_options
from sharded_orm.operations.key_input import typed_key

Model = type[models.Model]

# The number of rows that are read at a time.
_CHUNK_SIZE = 2000


class Command(dumpdata.Command):
    """Dumps the rows of models. The rows of a sharded model come from all shards.

    Without ``--database``, it dumps sharded models and those of the default database. With the
    alias of a shard group, it dumps the models of this group. With any other alias, it dumps the
    rows of that database, as Django does.
    """

    help = (
        "Output rows as a fixture of the given format: those of the default database, and those of"
        " sharded models from all shards."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        make_optional(
            parser, "Dump only this group, shard or database. By default: 'default' and all shards."
        )
        parser.add_argument(
            "--key",
            metavar="VALUE",
            help="Only dump rows with this shard key, of the sharded models of one group.",
        )

    def handle(self, *app_labels: str, **options: Any) -> None:
        alias, key = options["database"], options["key"]
        named, selected = _select_models(app_labels, options["exclude"])
        if key is None and alias not in runtime.topology().groups:
            if alias is not None:
                _refuse_absent(alias, named, selected)
            if alias is not None or not any(map(group_of, selected)):
                super().handle(*app_labels, **{**options, "database": alias or DEFAULT_DB_ALIAS})
                return
        elif key is not None:
            alias = _group_of_key(alias, selected)
        if alias is not None:
            selected = [model for model in selected if group_of(model) == alias]
            others = named.difference(selected)
            if others or not selected:
                labels = sorted(model._meta.label for model in others) or list(app_labels)
                raise CommandError(f"No rows of {labels!r} are in group {alias!r}. Leave them out.")
        if options["primary_keys"] and (len(app_labels) != 1 or len(selected) != 1):
            raise CommandError("You can only use --pks option with one model")
        self._dump(selected, **options)

    def _dump(self, selected: Sequence[Model], **options: Any) -> None:
        # This repeats the part of Django's handle() that writes rows. That part cannot be called,
        # because it makes querysets of one database, and the rows of sharded models are on many.
        if options["format"] not in serializers.get_public_serializer_formats():
            raise CommandError(f"Unknown serialization format: {options['format']}")
        try:
            if options["use_natural_foreign_keys"]:
                selected = serializers.sort_dependencies([(None, selected)], allow_cycles=True)
            rows = [queryset for model in selected for queryset in _rows_of(model, options)]
            shows_progress = options["output"] and options["verbosity"] and self.stdout.isatty()
            self.stdout.ending = None  # type: ignore[assignment]  # the type stubs allow no None, which Django's command sets, too
            with ExitStack() as stack:
                stream = _open_output(options["output"], stack) or self.stdout
                serializers.serialize(
                    options["format"],
                    chain.from_iterable(queryset.iterator(_CHUNK_SIZE) for queryset in rows),
                    indent=options["indent"],
                    use_natural_foreign_keys=options["use_natural_foreign_keys"],
                    use_natural_primary_keys=options["use_natural_primary_keys"],
                    stream=stream,
                    progress_output=self.stdout if shows_progress else None,
                    object_count=sum(q.order_by().count() for q in rows) if shows_progress else 0,
                )
        except CommandError:
            raise
        except Exception as exc:
            if options["traceback"]:
                raise
            raise CommandError(f"Unable to serialize database: {exc}") from exc


def _select_models(
    labels: Sequence[str], excluded: Sequence[str]
) -> tuple[set[Model], list[Model]]:
    """Return the pair (models that the labels name one by one, all models to be dumped).

    For example, with the labels ``users`` and ``photos.Photo``, the first collection has only the
    model ``Photo``. The second also has the models of the app ``users``.

    :param labels: names of apps, and of models such as ``photos.Photo``. If there are none, all
        models are dumped, except those of apps with the attribute ``is_left_out_of_fixtures``.
    :param excluded: names of apps and models that are not dumped.
    :raises CommandError: there is no such app or model.
    """
    named, chosen_apps = parse_apps_and_model_labels(labels)
    excluded_models, excluded_apps = parse_apps_and_model_labels(excluded)
    selected = [
        model
        for app in apps.get_app_configs()
        if app.models_module is not None
        and app not in excluded_apps
        and (labels or not getattr(app, "is_left_out_of_fixtures", False))
        for model in app.get_models()
        if (not labels or app in chosen_apps or model in named)
        and model not in excluded_models
        and not model._meta.proxy
    ]
    return named.intersection(selected), selected


def _refuse_absent(alias: str, named: set[Model], selected: Sequence[Model]) -> None:
    """Raise an error if a model has no table on ``alias``, because Django would silently dump no
    rows.

    Each model that was named one by one must have a table on ``alias``. If only apps were named, it
    is enough that one of their models has a table there.

    :param named: the models that the command line names one by one.
    :param selected: all models to be dumped.
    :raises CommandError: a model of ``named`` is not on ``alias``, or no model of ``selected`` is.
    """
    absent = {model for model in selected if not router.allow_migrate_model(alias, model)}
    wanted = absent.intersection(named) or (absent if len(absent) == len(selected) else set())
    if wanted and (runtime.topology().resolve(alias) or any(map(group_of, wanted))):
        raise CommandError(
            f"{sorted(model._meta.label for model in wanted)!r} have no rows on {alias!r}. Leave"
            " --database out, and all rows are dumped wherever they are."
        )


def _group_of_key(alias: str | None, selected: Sequence[Model]) -> str:
    groups = sorted({group for model in selected if (group := group_of(model)) is not None})
    if alias in runtime.topology().groups:
        return str(alias)
    if alias is not None:
        raise CommandError(f"--key finds the shard itself: leave '--database {alias}' out.")
    if len(groups) != 1:
        raise CommandError(
            f"--key is about the sharded models of one group, and these are of {groups!r}: name the"
            " group with --database, or its models."
        )
    return groups[0]


def _rows_of(model: Model, options: dict[str, Any]) -> Iterator[models.QuerySet[Any]]:
    """Yield a queryset of the rows of ``model`` to dump, in the order of their primary keys.

    The rows of a sharded model come from all shards. Yields nothing for an unsharded model whose
    rows are not in the default database.
    """
    shards = shard_options(model)
    manager: Any = model._base_manager if options["use_base_manager"] else model._default_manager
    rows: Any
    if shards is not None:
        # With ``use_base_manager``, all rows must be dumped, also those that the default manager
        # filters out. Django's base manager has all rows, but its querysets cannot read from
        # shards. A plain ShardedQuerySet has all rows and reads from shards.
        rows = ShardedQuerySet(model) if options["use_base_manager"] else manager.all()
        rows = rows.scatter()
        if options["key"] is not None:
            rows = rows.filter(**_condition_on_key(shards, options["key"]))
    elif router.allow_migrate_model(DEFAULT_DB_ALIAS, model):
        rows = manager.using(DEFAULT_DB_ALIAS)
    else:
        return
    if options["primary_keys"]:
        rows = rows.filter(pk__in=[pk.strip() for pk in options["primary_keys"].split(",")])
    yield rows.order_by(model._meta.pk.name)


def _condition_on_key(options: ShardOptions, text: str) -> dict[str, Any]:
    key: Any = options.key
    name = f"{options.model._meta.label}.{key.name}"
    try:
        value = typed_key(key, text, runtime.shard(options.group, 0).alias)
    except ValidationError as exc:
        raise CommandError(f"{text!r} cannot be {name}: {' '.join(exc.messages)}") from exc
    if runtime.locate(options.group, key.get_prep_value(value)) is None:
        raise CommandError(f"There are no rows with {name}={text!r}: the key has no shard.")
    return {key.attname: value}


def _open_output(path: str | None, stack: ExitStack) -> Any:
    """Open the file ``path``, which ``stack`` closes at its end; return None if ``path`` is empty.

    If the file's name ends in a suffix such as ``.gz``, the output is compressed.
    """
    if not path:
        return None
    suffix = Path(path).suffix
    if suffix == ".gz":
        return stack.enter_context(gzip.open(path, "wt"))
    if suffix == ".bz2":
        import bz2

        return stack.enter_context(bz2.open(path, "wt"))
    if suffix in (".lzma", ".xz"):
        import lzma

        form = lzma.FORMAT_ALONE if suffix == ".lzma" else lzma.FORMAT_XZ
        return stack.enter_context(lzma.open(path, "wt", format=form))
    if suffix == ".zip":
        raise CommandError("dumpdata writes no .zip files: use .gz, .bz2, .lzma or .xz.")
    return stack.enter_context(open(path, "w"))
