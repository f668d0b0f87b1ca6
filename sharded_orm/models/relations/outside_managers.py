"""Mixins for related managers whose instance is global, or of another group than the related rows."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from django.db import transaction

from sharded_orm import compat, runtime
from sharded_orm.exceptions import ShardKeyRequired
from sharded_orm.models.relations.managers import RelatedRows
from sharded_orm.models.sharding.bound_rows import refuse_other_key
from sharded_orm.models.sharding.current_shard import current_alias
from sharded_orm.models.sharding.key_errors import describe
from sharded_orm.models.sharding.row_placement import colocated_alias


class FromOutside(RelatedRows):
    """The manager of ``person.photos`` if the person is global or of another group than the photos.

    The photos may be on any shard. If their foreign key to the person is the shard key, all photos
    of one person are on one shard. Otherwise each photo is on the shard of its own shard key, and a
    query must have a condition on that key. The manager does not ask the router for a shard,
    because Django does not tell the router which relation is followed.
    """

    core_filters: dict[str, Any]

    def _apply_rel_filters(self, queryset: Any) -> Any:
        # Overrides RelatedManager._apply_rel_filters() with a copy of Django's code. The copy omits
        # the case of a database that stores an empty string as NULL, because no such database can
        # have shards.
        queryset._add_hints(instance=self.instance)
        if self._db:
            queryset = queryset.using(self._db)
        compat.copy_fetch_mode(queryset, self.instance)
        queryset._defer_next_filter = True
        queryset = queryset.filter(**self.core_filters)
        values = self.field.get_foreign_related_value(self.instance)
        if None in values:
            return queryset.none()
        known = values[0] if len(values) == 1 else values
        queryset._known_related_objects = {self.field: {known: self.instance}}
        return queryset

    def add(self, *objs: Any, bulk: bool = True) -> None:
        # Overrides RelatedManager.add(), which updates rows on one alias only. The rows may be on
        # several shards, so send an UPDATE to each of these shards.
        self._begin_change()
        for obj in objs:
            self._check_type(obj)
        self._repeated(lambda: self._add_rows(objs, bulk=bulk))

    add.alters_data = True  # type: ignore[attr-defined]  # Django's method has this attribute, too

    def _add_rows(self, objs: Iterable[Any], *, bulk: bool) -> None:
        if bulk:
            by_alias = self._pks_by_alias(objs)
        values = self._related({})
        for obj in objs:
            for name, value in values.items():
                setattr(obj, name, value)
        if not bulk:
            with self._atomic():
                for obj in objs:
                    obj.save()
            return
        # Leave the shard key out of the UPDATE. No key changes here, because rows whose key would
        # change were refused before.
        key = self._options.key
        changes = {name: value for name, value in values.items() if not key or name != key.name}
        if changes:
            with self._atomic(several_statements=len(by_alias) > 1):
                for alias, pks in by_alias.items():
                    rows = self.model._base_manager.using(alias).filter(pk__in=pks)
                    rows.update(**changes)

    def set(self, objs: Iterable[Any], *, bulk: bool = True, clear: bool = False) -> None:
        # Overrides RelatedManager.set(), which works on one alias only. If the foreign key may be
        # NULL, set() would have to remove the old rows, which may be on any shard. So refuse it.
        if self.field.null:
            raise self._unbounded("set()")
        self.add(*tuple(objs), bulk=bulk)

    set.alters_data = True  # type: ignore[attr-defined]  # Django's method has this attribute, too

    def create(self, **kwargs: Any) -> Any:
        # Overrides RelatedManager.create(), which gets the alias from the router. Here the key of
        # the new row determines the shard.
        self._begin_change()
        return self._plain_manager_method("create")(**self._related(kwargs))

    create.alters_data = True  # type: ignore[attr-defined]  # Django's method has this attribute, too

    def get_or_create(self, **kwargs: Any) -> Any:
        # Overrides RelatedManager.get_or_create(), which gets the alias from the router. Here the
        # values to look up, such as the shard key, determine the shard.
        self._check_fk_val()
        return self._plain_manager_method("get_or_create")(**self._related(kwargs))

    get_or_create.alters_data = True  # type: ignore[attr-defined]  # Django's method has this attribute, too

    def update_or_create(self, **kwargs: Any) -> Any:
        # Overrides RelatedManager.update_or_create(), which gets the alias from the router. Here
        # the values to look up, such as the shard key, determine the shard.
        self._check_fk_val()
        return self._plain_manager_method("update_or_create")(**self._related(kwargs))

    update_or_create.alters_data = True  # type: ignore[attr-defined]  # Django's method has this attribute, too

    def _check_fk_val(self) -> None:
        super()._check_fk_val()  # type: ignore[misc]  # Django's manager class has this method

    def _begin_change(self) -> None:
        self._check_fk_val()
        self._remove_prefetched_objects()  # type: ignore[attr-defined]  # Django's manager class has this method

    def _related(self, values: dict[str, Any]) -> dict[str, Any]:
        return {**values, self.field.name: self.instance}

    def _plain_manager_method(self, name: str) -> Any:
        """Return the method called ``name`` of the model's own manager, such as ``create()``.

        In the method resolution order, Django's related manager comes first. So ``super()`` without
        arguments would find the method of the related manager.
        """
        return getattr(super(self._django, self), name)

    def _check_type(self, obj: Any) -> None:
        if not isinstance(obj, self.model):
            raise TypeError(f"{self.model._meta.object_name!r} instance expected, got {obj!r}")
        refuse_other_key(obj)

    def _pks_by_alias(self, objs: Iterable[Any]) -> dict[str, list[Any]]:
        """Map the alias of each shard to the primary keys of those ``objs`` that are stored there.

        :raises ValueError: one of ``objs`` is not stored on a shard.
        """
        by_alias: dict[str, list[Any]] = {}
        for obj in objs:
            alias = current_alias(self._options, obj)
            if obj._state.adding or runtime.topology().resolve(str(alias)) is None:
                raise ValueError(
                    f"{obj!r} instance isn't saved. Use bulk=False or save the object first."
                )
            by_alias.setdefault(str(alias), []).append(obj.pk)
        return by_alias

    def _atomic(self, *, several_statements: bool = True) -> AbstractContextManager[Any]:
        # A single statement needs no transaction block.
        if not several_statements:
            return nullcontext()
        return transaction.atomic(using=self._options.group, savepoint=False)

    def _unbounded(self, method: str) -> ShardKeyRequired:
        options = self._options
        name, change = self._relation_and_change()
        key = options.key.name if options.key is not None else None
        return ShardKeyRequired(
            f"{method} of {name!r} is about rows of {self.model._meta.object_name} on any shard of group"
            f" {options.group!r}, and {describe(self.instance)} does not tell which. Use add() and"
            f" remove() with the rows, .filter({key}=…).{change} for those of one key, or"
            f" .scatter().{change} for all."
        )

    def _relation_and_change(self) -> tuple[str, str]:
        """Return this manager's name and a call of a queryset, both for an error message.

        The call unrelates rows. For example, ``("photos", "update(person=None)")``.
        """
        return self.field.remote_field.get_accessor_name(), f"update({self.field.name}=None)"


class NullableFromOutside(FromOutside):
    """The manager of ``person.photos`` if the foreign key may be NULL; see :class:`FromOutside`."""

    def remove(self, *objs: Any, bulk: bool = True) -> None:
        # Overrides RelatedManager.remove(), which works on one alias only. The rows may be on
        # several shards, so send an UPDATE to each of these shards.
        if not objs:
            return
        self._repeated(lambda: self._remove_rows(objs, bulk=bulk))

    remove.alters_data = True  # type: ignore[attr-defined]  # Django's method has this attribute, too

    def _remove_rows(self, objs: Iterable[Any], *, bulk: bool) -> None:
        self._check_fk_val()
        related_value = self.field.get_foreign_related_value(self.instance)
        by_alias: dict[str, set[Any]] = {}
        for obj in objs:
            self._check_type(obj)
            if self.field.get_local_related_value(obj) != related_value:
                raise self.field.remote_field.model.DoesNotExist(
                    f"{obj!r} is not related to {self.instance!r}."
                )
            if obj.pk is not None:
                by_alias.setdefault(self._alias_of(obj), set()).add(obj.pk)
        self._begin_change()
        with self._atomic(several_statements=len(by_alias) > 1 or not bulk):
            for alias, pks in by_alias.items():
                rows = self.using(alias).filter(pk__in=pks)  # type: ignore[attr-defined]  # Django's manager class has this method
                if bulk:
                    rows.update(**{self.field.name: None})
                    continue
                for row in rows:
                    setattr(row, self.field.name, None)
                    row.save(update_fields=[self.field.name])

    def clear(self, *, bulk: bool = True) -> None:
        # Overrides RelatedManager.clear(), which works on one alias only. The rows may be on any
        # shard, so refuse it.
        self._check_fk_val()
        raise self._unbounded("clear()")

    clear.alters_data = True  # type: ignore[attr-defined]  # Django's method has this attribute, too

    def _alias_of(self, row: Any) -> str:
        # Accept any row whose values determine its shard, even if it was not read from a database.
        # Django also accepts such a row if it has a primary key.
        alias = colocated_alias(self._options, row)
        if alias is None:
            raise ShardKeyRequired(
                f"{describe(row)} is on no shard of group {self._options.group!r}: pass a row that is stored."
            )
        return alias
