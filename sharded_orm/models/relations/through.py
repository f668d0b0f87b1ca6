"""Puts each row of an automatic many-to-many table on the shard of the two rows that it relates.

Django derives the models of these tables from its own :class:`~django.db.models.Model`, and not
from :class:`~sharded_orm.models.ShardedModel`. So this module adds the methods that the models
would inherit from it.
"""

from __future__ import annotations

from typing import Any

from django.db import router
from django.db.models import Model

from sharded_orm import database_settings, runtime
from sharded_orm.exceptions import BoundKeyMismatch, CrossShardRelation
from sharded_orm.models.querysets.route import scoped
from sharded_orm.models.querysets.sharded import ShardedManager
from sharded_orm.models.sharding.bound_key import key_in_force, unbound
from sharded_orm.models.sharding.bound_rows import refuse_other_key, refuse_rows_given_by_id
from sharded_orm.models.sharding.key_errors import describe
from sharded_orm.models.sharding.options import shard_options
from sharded_orm.models.sharding.row_placement import colocated_alias
from sharded_orm.models.sharding.same_key import are_of_two_keys, refuse_related_of_other_key


def install_through(model: type[Model]) -> None:
    """Add the manager and the checks of sharded models to the many-to-many tables of ``model``.

    Only automatic tables of fields that ``model`` declares are changed. A table with an explicit
    ``through`` model is not changed.
    """
    fields: Any = model._meta.local_many_to_many
    for field in fields:
        through = field.remote_field.through
        if isinstance(through, str) or through is None or not through._meta.auto_created:
            continue
        if through.save_base is _save_base:
            continue  # This function was called for the field before.
        # Remove Django's manager from the table's model. Otherwise it would take precedence over
        # ShardedManager.
        through._meta.local_managers.clear()
        through.add_to_class("objects", ShardedManager())
        through.__eq__ = _eq
        through.save_base = _save_base
        through.delete = _delete
        through._refuse_other_shard = _refuse_other_shard
        through._perform_unique_checks = _perform_unique_checks


def _eq(self: Any, other: object) -> bool:
    # Overrides Model.__eq__(), as ShardedModel does.
    is_equal = Model.__eq__(self, other)
    return is_equal if is_equal is not True else not are_of_two_keys(self, other)


def _save_base(
    self: Any,
    raw: bool = False,
    force_insert: Any = False,
    force_update: bool = False,
    using: str | None = None,
    update_fields: Any = None,
) -> None:
    # Overrides Model.save_base(). The router or the caller has chosen the alias ``using``. Check
    # that it is the alias of the shard of the two related rows.
    refuse_other_key(self)
    refuse_rows_given_by_id(self, update_fields)
    _refuse_other_shard(self, str(using))
    _refuse_stored_row_of_other_key(self, str(using))
    Model.save_base(self, raw, force_insert, force_update, using, update_fields)


def _delete(
    self: Any, using: str | None = None, keep_parents: bool = False
) -> tuple[int, dict[str, int]]:
    # Overrides Model.delete().
    refuse_other_key(self)
    _refuse_stored_row_of_other_key(self, using or router.db_for_write(type(self), instance=self))
    return Model.delete(self, using, keep_parents)


_delete.alters_data = True  # type: ignore[attr-defined]  # Django's method has this attribute, too


def _refuse_stored_row_of_other_key(self: Any, alias: str) -> None:
    """Raise :exc:`BoundKeyMismatch` if the stored row does not have the bound key.

    The bound key is the shard key that ``bound()`` has set. Without this check, code could read the
    row before a ``bound()`` block and change it inside the block.

    A row of an automatic many-to-many table contains the ids of the two related rows, but not their
    shard key. So if a key is bound, one query reads the key of a related row.
    """
    key = key_in_force(type(self))
    if key is None or self.pk is None:
        return
    with unbound():
        stored = type(self).objects.using(alias).filter(pk=self.pk)
        if stored.exclude(**{key.name: key.value}).exists():
            raise BoundKeyMismatch(
                f"{describe(self)} on {alias!r} relates rows of another shard key, and {key} is in"
                " force. Work on it inside sharded_orm.unbound(), or under its own key."
            )


def _perform_unique_checks(self: Any, unique_checks: Any) -> Any:
    # Overrides Model._perform_unique_checks(). Values must be unique on this row's shard only, so
    # Django's queries are sent to that shard.
    with scoped(router.db_for_write(type(self), instance=self)), unbound():
        return Model._perform_unique_checks(self, unique_checks)  # type: ignore[operator]  # missing in Django's type stubs


def _refuse_other_shard(self: Any, alias: str) -> None:
    """Raise an error if a row of an automatic many-to-many table cannot be saved on ``alias``.

    Saving is refused if ``alias`` is not a shard of the table's group, or if the row refers to a
    row that is known to be on another shard.
    """
    options = shard_options(type(self))
    assert options is not None
    target = runtime.topology().resolve(alias)
    if target is None and database_settings.template_group(alias) == options.group:
        return
    if target is None or target.group != options.group:
        raise CrossShardRelation(
            f"{describe(self)} cannot be saved on {alias!r}, which is no shard of group"
            f" {options.group!r}. Leave out using=."
        )
    refuse_related_of_other_key(self)
    for field in self._meta.concrete_fields:
        other = field.get_cached_value(self, default=None) if field.is_relation else None
        other_alias = None if other is None else colocated_alias(options, other)
        if (
            other_alias is None
            and options.names_shard(field)
            and (value := getattr(self, field.attname))
        ):
            shard = runtime.locate(options.group, field.get_prep_value(value))
            other_alias = None if shard is None else shard.alias
        if other_alias not in (None, alias):
            raise CrossShardRelation(
                f"{describe(self)} cannot be saved on {alias!r}: its {field.name!r} is on {other_alias!r}."
                " Rows of one group can only be related on one shard."
            )
