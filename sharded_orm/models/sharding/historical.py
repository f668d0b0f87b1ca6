"""Finds the group of a historical model: a model in migrations that is no longer installed.

Migrations of a renamed or deleted model still run on every new shard of its group. They must not
run on any other database.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from django.apps import apps
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.operations import RenameModel, SeparateDatabaseAndState
from django.db.migrations.operations.base import Operation

from sharded_orm import runtime
from sharded_orm.models.sharding.copies import has_copies
from sharded_orm.models.sharding.options import shard_options


def group_of_historical_model(app_label: str, model_name: str) -> str | None:
    """Return the group of a model that is not installed, or None for the global database.

    The first rule that applies decides:

    - If the model is in the ``FORMER_MODELS`` of a group, it is in that group.
    - If the model was renamed to an installed model, it is in the group of the installed model.
    - If all models of the app, installed or in ``FORMER_MODELS``, are in one group, it is in that
      group.

    Otherwise the result is None.

    Reads the app's migrations from disk, once per process.
    """
    for group in runtime.topology().groups.values():
        if (app_label, model_name.lower()) in group.former_models:
            return group.name
    renamed = _current_name(app_label, MigrationLoader.migrations_module(app_label)[0], model_name)
    if renamed is not None:
        options = shard_options(apps.get_model(app_label, renamed))
        return options.group if options is not None else None
    groups = groups_of_app(app_label)
    return groups.pop() if len(groups) == 1 else None


def named_model_has_copies(app_label: str, model_name: str) -> bool:
    """Return whether the model that a migration names is a global model with copies on each shard.

    :param model_name: the model's name in the migration.
    """
    if app_label not in apps.app_configs:
        return False
    name: str | None = model_name.lower()
    if name not in apps.all_models[app_label]:
        module = MigrationLoader.migrations_module(app_label)[0]
        name = _current_name(app_label, module, model_name)
    return name is not None and has_copies(apps.get_model(app_label, name))


def groups_of_app(app_label: str) -> set[str | None]:
    """Return the names of the groups in which the app has tables.

    The set contains None if the app also has tables in the global database.
    """
    groups: set[str | None] = {
        group.name
        for group in runtime.topology().groups.values()
        if any(label == app_label for label, _ in group.former_models)
    }
    try:
        models = apps.get_app_config(app_label).get_models(include_auto_created=True)
    except LookupError:
        return groups
    for model in models:
        options = shard_options(model)
        groups.add(options.group if options is not None else None)
    return groups


def _current_name(app_label: str, module: str | None, model_name: str) -> str | None:
    """Return the present name of a model that was renamed.

    Return None if the model was never renamed, or was deleted after it was renamed.
    """
    names = _new_names(app_label, module)
    name, seen = model_name.lower(), set[str]()
    while name in names and name not in seen:
        seen.add(name)
        name = names[name]
    if name in seen or name == model_name.lower():
        return None
    return name if name in apps.all_models[app_label] else None


@cache
def _new_names(app_label: str, module: str | None) -> dict[str, str]:
    # The parameter ``module`` is not used here. It makes @cache store a separate result for each
    # migrations module, because tests may set another migrations module for the app.
    loader = MigrationLoader(None, ignore_no_migrations=True)
    return {
        operation.old_name_lower: operation.new_name_lower
        for (label, _), migration in sorted(loader.disk_migrations.items())
        if label == app_label
        for operation in _state_operations(migration.operations)
        if isinstance(operation, RenameModel)
    }


def _state_operations(operations: Iterable[Operation]) -> Iterable[Operation]:
    for operation in operations:
        if isinstance(operation, SeparateDatabaseAndState):
            yield from _state_operations(operation.state_operations)
        else:
            yield operation
