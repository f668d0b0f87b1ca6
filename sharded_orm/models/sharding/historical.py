"""Where the tables of models belong that migrations know and the code does not any more.

Migrations of a model that was renamed or deleted still run on every new shard, and must not
run anywhere else.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from django.apps import apps
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.operations import RenameModel, SeparateDatabaseAndState
from django.db.migrations.operations.base import Operation

from sharded_orm import runtime
from sharded_orm.models.sharding.options import shard_options


def group_of_former(app_label: str, model_name: str) -> str | None:
    """The group of a model that is not installed; None for one of the global database.

    In this order: a group whose ``FORMER_MODELS`` names it; the group of the model that it was
    renamed to; the group of the app, when all the models that it has now are of one.

    Cost: the app's migrations are read once per process, from disk.
    """
    for group in runtime.topology().groups.values():
        if (app_label, model_name.lower()) in group.former_models:
            return group.name
    renamed = _renamed(app_label, MigrationLoader.migrations_module(app_label)[0], model_name)
    if renamed is not None:
        options = shard_options(apps.get_model(app_label, renamed))
        return options.group if options is not None else None
    groups = groups_of_app(app_label)
    return groups.pop() if len(groups) == 1 else None


def groups_of_app(app_label: str) -> set[str | None]:
    """The groups in which the app has tables, None for the global database."""
    found: set[str | None] = {
        group.name
        for group in runtime.topology().groups.values()
        if any(label == app_label for label, _ in group.former_models)
    }
    try:
        models = apps.get_app_config(app_label).get_models(include_auto_created=True)
    except LookupError:
        return found
    for model in models:
        options = shard_options(model)
        found.add(options.group if options is not None else None)
    return found


def _renamed(app_label: str, module: str | None, model_name: str) -> str | None:
    """What ``model_name`` is called now; None if it was not renamed or is gone."""
    names = _renames(app_label, module)
    name, seen = model_name.lower(), set[str]()
    while name in names and name not in seen:
        seen.add(name)
        name = names[name]
    if name in seen or name == model_name.lower():
        return None
    return name if name in apps.all_models[app_label] else None


@cache
def _renames(app_label: str, module: str | None) -> dict[str, str]:
    # By the module as well: settings may name another one for tests.
    loader = MigrationLoader(None, ignore_no_migrations=True)
    return {
        operation.old_name_lower: operation.new_name_lower
        for (label, _), migration in sorted(loader.disk_migrations.items())
        if label == app_label
        for operation in _flat(migration.operations)
        if isinstance(operation, RenameModel)
    }


def _flat(operations: Iterable[Operation]) -> Iterable[Operation]:
    for operation in operations:
        if isinstance(operation, SeparateDatabaseAndState):
            yield from _flat(operation.state_operations)
        else:
            yield operation
