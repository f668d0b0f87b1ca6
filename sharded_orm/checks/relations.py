"""Checks of the relations of models: foreign keys, many-to-many tables, generic relations.

:mod:`sharded_orm.checks.models` calls them for each model. No check queries a database.

==================  ==========================================================
``sharded_orm.E006``  a foreign key with a database constraint refers to a table outside the group
``sharded_orm.E007``  an ``on_delete`` would run on an alias that does not have the rows, or a
                      policy of ``sharded_orm.on_delete`` is on a foreign key that does not need it
``sharded_orm.E008``  a many-to-many table would join models of different groups
``sharded_orm.W020``  a foreign key inside the group has no database constraint
``sharded_orm.E022``  a generic relation leaves the group by an id that is unique only within its shard
``sharded_orm.E080``  an ``on_delete`` would give a shard key another value
==================  ==========================================================
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.apps import apps
from django.conf import settings
from django.core import checks
from django.db import models

from sharded_orm import on_delete
from sharded_orm.models.base import ShardedModel
from sharded_orm.models.sharding.copies import has_copies
from sharded_orm.models.sharding.counted_ids import counts_per_shard
from sharded_orm.models.sharding.options import ShardOptions, shard_options
from sharded_orm.models.sharding.rewritten_keys import (
    is_shard_key,
    name_of_new_value,
    name_of_policy,
    policy_of,
)


def check_relations(model: type[models.Model]) -> Iterator[checks.CheckMessage]:
    """Check the relations of ``model``, sharded or not, to other models."""
    yield from _relations(model)
    yield from _generic_relations(model)


def _relations(model: type[models.Model]) -> Iterator[checks.CheckMessage]:
    own = group_of_model(model)
    for field in model._meta.local_fields:
        remote = field.remote_field
        if remote is None or isinstance(remote.model, str):
            continue
        other = group_of_model(remote.model)
        policy = policy_of(remote.on_delete)
        is_policy = policy in on_delete.POLICIES
        if own is not None and is_shard_key(field):
            name = "SET_NULL" if policy is on_delete.SET_NULL else name_of_new_value(policy)
            if name is not None:
                yield _rewritten_key(field, name)
                continue
        if is_policy and (own is None or other is not None):
            yield checks.Error(
                f"sharded_orm.on_delete.{name_of_policy(policy)} is for foreign keys from shards to"
                " the global database, and this one is none.",
                hint="Use on_delete=DO_NOTHING, or inside one group or the global database one of"
                " Django's.",
                obj=field,
                id="sharded_orm.E007",
            )
            continue
        if policy is on_delete.SET_NULL and not field.null:
            yield checks.Error(
                f"The foreign key {field.name!r} has on_delete=SET_NULL, and cannot be NULL.",
                hint="Set null=True, or another on_delete.",
                obj=field,
                id="sharded_orm.E007",
            )
        if own is not None and own == other:
            yield from _unenforced(model, field)
        if own == other:
            continue
        where = f"group {other!r}" if other is not None else "the global database"
        if getattr(field, "db_constraint", False) and not (own and has_copies(remote.model)):
            yield checks.Error(
                f"A database cannot enforce a foreign key to {remote.model.__name__}, which is in"
                f" {where}.",
                hint=_hint(
                    model,
                    remote.model,
                    f"Set db_constraint=False and {_policies_hint(own, other)}.",
                ),
                obj=field,
                id="sharded_orm.E006",
            )
        if policy is not models.DO_NOTHING and not is_policy:
            yield checks.Error(
                f"on_delete={name_of_policy(policy)} of a foreign key to {where} would run on the"
                " alias of the deleted row, where these rows are not.",
                hint=_hint(model, remote.model, f"Set {_policies_hint(own, other)}."),
                obj=field,
                id="sharded_orm.E007",
            )
    for many in model._meta.local_many_to_many:
        remote_model: Any = many.remote_field.model
        if isinstance(remote_model, str):
            continue
        through = many.remote_field.through
        groups = {own, group_of_model(remote_model)}
        if through is not None and not through._meta.auto_created:
            groups.add(group_of_model(through))
        if len(groups) > 1:
            yield checks.Error(
                f"The many-to-many table of {many.name!r} would join {model.__name__} and"
                f" {remote_model.__name__}, which are not in the same group.",
                hint=_hint(
                    model,
                    remote_model,
                    "Store the relation as a ShardedModel of its own, once per side.",
                ),
                obj=many,
                id="sharded_orm.E008",
            )


def _rewritten_key(field: Any, on_delete_name: str) -> checks.CheckMessage:
    return checks.Error(
        f"on_delete={on_delete_name} of the shard key {field.name!r} would give it another value, and"
        " the rows would stay on the shard of the former one.",
        hint="Set on_delete to CASCADE or PROTECT. To keep rows, create them under the new key, and"
        " delete the old ones.",
        obj=field,
        id="sharded_orm.E080",
    )


def _generic_relations(model: Any) -> Iterator[checks.CheckMessage]:
    options = shard_options(model) if group_of_model(model) is not None else None
    if options is None or not counts_per_shard(options.model._meta.pk):
        return
    for field in model._meta.private_fields:
        # Skip a GenericForeignKey, which has no single related model.
        remote_model = getattr(field.remote_field, "model", None)
        if not isinstance(remote_model, type) or group_of_model(remote_model) == options.group:
            continue
        yield checks.Error(
            f"The rows of {remote_model.__name__} in {field.name!r} are in another group or in the"
            f" global database and know {model.__name__} by its primary key, which counts on each shard"
            " by itself: they would be about rows of several shards.",
            hint="Use TicketField(primary_key=True) for ids that are unique everywhere, or keep both"
            " models in one group.",
            obj=field,
            id="sharded_orm.E022",
        )


def _policies_hint(own: str | None, other: str | None) -> str:
    if own is not None and other is None:
        return "on_delete to CASCADE, PROTECT, SET_NULL or LEAVE of sharded_orm.on_delete"
    return "on_delete=DO_NOTHING, and delete the rows of the other side yourself"


def _hint(model: type[models.Model], remote: type[models.Model], hint: str) -> str:
    """Return ``hint``, which asks for another relation between ``model`` and ``remote``.

    If one of them is a sharded user model, the relation may be that of an app that the project
    cannot change, such as Django's admin. Then the user model is what can be changed.
    """
    for user, other in ((model, remote), (remote, model)):
        is_user = user._meta.label_lower == settings.AUTH_USER_MODEL.lower()
        if not is_user or group_of_model(user) is None:
            continue
        app = apps.get_app_config(other._meta.app_label)
        without = "PermissionsMixin" if app.name == "django.contrib.auth" else repr(app.name)
        remedy = (
            f"keep the user model {user.__name__} in the global database, and make a sharded profile"
            f" for what is large; or do without {without}."
        )
        if app.name.startswith("django."):
            return f"K{remedy[1:]}"
        return f"{hint} If {app.name!r} is not an app of yours, {remedy}"
    return hint


def _unenforced(model: Any, field: Any) -> Iterator[checks.CheckMessage]:
    if getattr(field, "db_constraint", True):
        return
    target: Any = field.target_field
    own, theirs = (
        getattr(getattr(side, "ShardMeta", None), "shard_key", None)
        for side in (model, field.remote_field.model)
    )
    if own in (field.name, field.attname) and theirs in (target.name, target.attname):
        # The foreign key is the model's shard key, and refers to the shard key of the other model.
        # So both rows are always on the same shard. Give no warning.
        return
    yield checks.Warning(
        f"The foreign key {field.name!r} is not enforced by the database, and its rows are looked up"
        " on one shard all the same: one that is on another shard is not found.",
        hint="Leave out db_constraint=False. To refer to rows of any shard, store the id in a"
        " BigIntegerField.",
        obj=field,
        id="sharded_orm.W020",
    )


def group_of_model(model: type[models.Model]) -> str | None:
    if issubclass(model, ShardedModel):
        meta = getattr(model, "ShardMeta", None)
        return getattr(meta, "group", None)
    options: ShardOptions | None = shard_options(model)
    return options.group if options is not None else None
