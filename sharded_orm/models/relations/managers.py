"""Mixins for Django's related managers.

Django's managers ask the router for one alias, by their instance. That is right if the related
rows are on the shard of the instance (:class:`Beside`, :class:`ManyBeside`). It is wrong if the
instance is global or of another group (:class:`FromOutside`).
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from django.db import router, transaction
from django.db.models import Model, Q

from sharded_orm import runtime
from sharded_orm.exceptions import CrossShardRelation, ShardKeyRequired
from sharded_orm.models.sharding.options import (
    ShardOptions,
    colocated_alias,
    describe,
    shard_options,
)
from sharded_orm.routing.where import OnShard


class RelatedRows:
    """Attributes of Django's related managers."""

    instance: Any
    model: Any
    #: The foreign key, or the many-to-many field.
    field: Any
    _db: str | None
    #: The class that Django made, which follows ours in the MRO.
    _django: type[Any]

    @property
    def _options(self) -> ShardOptions:
        options = shard_options(self.model)
        assert options is not None
        return options


def _refuse_rows_of_other_shards(instance: Any, rows: Iterable[Any]) -> None:
    """Raise :exc:`CrossShardRelation` for rows of other shards: this shard may repeat their ids."""
    for row in rows:
        if isinstance(row, Model):
            router.allow_relation(row, instance)


class Beside(RelatedRows):
    """``album.photos``: rows on the shard of the instance.

    Django compares primary keys, which rows of other shards may repeat.
    """

    def add(self, *objs: Any, bulk: bool = True) -> None:
        # Overrides RelatedManager.add, so that the refusal comes before a transaction begins.
        _refuse_rows_of_other_shards(self.instance, objs)
        super().add(*objs, bulk=bulk)  # type: ignore[misc]  # of Django's manager

    add.alters_data = True  # type: ignore[attr-defined]  # as Django marks it

    def set(self, objs: Iterable[Any], *, bulk: bool = True, clear: bool = False) -> None:
        # Overrides RelatedManager.set (create_reverse_many_to_one_manager).
        objs = tuple(objs)
        _refuse_rows_of_other_shards(self.instance, objs)
        super().set(objs, bulk=bulk, clear=clear)  # type: ignore[misc]  # of Django's manager

    set.alters_data = True  # type: ignore[attr-defined]  # as Django marks it


class NullableBeside(Beside):
    """``album.photos`` of a foreign key that may be NULL."""

    def remove(self, *objs: Any, bulk: bool = True) -> None:
        # Overrides RelatedManager.remove.
        _refuse_rows_of_other_shards(self.instance, objs)
        super().remove(*objs, bulk=bulk)  # type: ignore[misc]  # of Django's manager

    remove.alters_data = True  # type: ignore[attr-defined]  # as Django marks it


class ManyBeside(RelatedRows):
    """``photo.tags``, from either side: the rows and the many-to-many table are on one shard."""

    through: Any
    target_field: Any
    target_field_name: str

    def _apply_rel_filters(self, queryset: Any) -> Any:
        # Overrides ManyRelatedManager._apply_rel_filters, which compares the primary key only:
        # later conditions must not lead to another shard with an equal one. Calls add_q(), because
        # filter() would refuse a slice and end the deferral of Django's next filter.
        alias = colocated_alias(self._options, self.instance)
        if alias is not None:
            queryset.query.add_q(Q(OnShard(alias)))
        return super()._apply_rel_filters(queryset)  # type: ignore[misc]  # of Django's manager

    def add(self, *objs: Any, through_defaults: Any = None) -> None:
        # Overrides ManyRelatedManager.add. With INSERT IGNORE, MariaDB silently drops a row that
        # refers to a row of another shard.
        self._check_targets(objs)
        super().add(*objs, through_defaults=through_defaults)  # type: ignore[misc]  # of Django's manager

    add.alters_data = True  # type: ignore[attr-defined]  # as Django marks it

    def set(
        self, objs: Iterable[Any], *, clear: bool = False, through_defaults: Any = None
    ) -> None:
        # Overrides ManyRelatedManager.set, which removes rows before it checks the new ones.
        objs = tuple(objs)
        self._check_targets(objs)
        super().set(objs, clear=clear, through_defaults=through_defaults)  # type: ignore[misc]  # of Django's manager

    set.alters_data = True  # type: ignore[attr-defined]  # as Django marks it

    def remove(self, *objs: Any) -> None:
        # Overrides ManyRelatedManager.remove, which compares primary keys.
        _refuse_rows_of_other_shards(self.instance, objs)
        super().remove(*objs)  # type: ignore[misc]  # of Django's manager

    remove.alters_data = True  # type: ignore[attr-defined]  # as Django marks it

    def _check_targets(self, objs: Any) -> None:
        # Called before a transaction begins, which an error would break.
        self._get_target_ids(self.target_field_name, objs)  # type: ignore[attr-defined]  # of Django's manager
        self._refuse_absent(objs)

    def _refuse_absent(self, objs: Any) -> None:
        values = {
            self.target_field.get_foreign_related_value(obj)[0]
            if isinstance(obj, Model)
            else self.target_field.get_prep_value(obj)
            for obj in objs
            if not isinstance(obj, Model) or obj._state.adding
        }
        if not values:
            return
        alias = router.db_for_write(self.through, instance=self.instance)
        column = self.target_field.target_field.attname
        rows = self.model._base_manager.using(alias).filter(**{f"{column}__in": values})
        absent = values.difference(rows.values_list(column, flat=True))
        if absent:
            name = self.model._meta.object_name
            raise CrossShardRelation(
                f"{describe(self.instance)} is on shard {alias!r}, where there is no {name} with"
                f" {column} in {sorted(absent, key=repr)!r}: rows of one group can only be related on one"
                " shard. Relate it to rows that are stored and have the same shard key."
            )


class FromOutside(RelatedRows):
    """``person.photos``: rows on any shard, of an instance that is global or of another group.

    If the relation is the shard key, its rows are on one shard. Otherwise each row, or the
    caller, names the shard. The router is not asked, because it does not know the relation.
    """

    core_filters: dict[str, Any]

    def _apply_rel_filters(self, queryset: Any) -> Any:
        # Overrides RelatedManager._apply_rel_filters, without the case of databases that take an
        # empty string for NULL: none of them can have shards.
        queryset._add_hints(instance=self.instance)
        if self._db:
            queryset = queryset.using(self._db)
        queryset._defer_next_filter = True
        queryset = queryset.filter(**self.core_filters)
        values = self.field.get_foreign_related_value(self.instance)
        if None in values:
            return queryset.none()
        known = values[0] if len(values) == 1 else values
        queryset._known_related_objects = {self.field: {known: self.instance}}
        return queryset

    def add(self, *objs: Any, bulk: bool = True) -> None:
        # Overrides RelatedManager.add, which updates the rows of one alias.
        self._begin_change()
        for obj in objs:
            self._check_type(obj)
        if bulk:
            by_alias = self._pks_by_alias(objs)
        for obj in objs:
            setattr(obj, self.field.name, self.instance)
        if not bulk:
            with self._atomic():
                for obj in objs:
                    obj.save()
        elif self.field is not self._options.key:
            with self._atomic(several_statements=len(by_alias) > 1):
                for alias, pks in by_alias.items():
                    rows = self.model._base_manager.using(alias).filter(pk__in=pks)
                    rows.update(**{self.field.name: self.instance})

    add.alters_data = True  # type: ignore[attr-defined]  # as Django marks it

    def set(self, objs: Iterable[Any], *, bulk: bool = True, clear: bool = False) -> None:
        # Overrides RelatedManager.set.
        if self.field.null:
            raise self._unbounded("set()")
        self.add(*tuple(objs), bulk=bulk)

    set.alters_data = True  # type: ignore[attr-defined]  # as Django marks it

    def create(self, **kwargs: Any) -> Any:
        # Overrides RelatedManager.create, which uses one alias: here the row's key decides.
        self._begin_change()
        return self._plain_manager_method("create")(**self._related(kwargs))

    create.alters_data = True  # type: ignore[attr-defined]  # as Django marks it

    def get_or_create(self, **kwargs: Any) -> Any:
        # Overrides RelatedManager.get_or_create, which uses one alias.
        self._check_fk_val()
        return self._plain_manager_method("get_or_create")(**self._related(kwargs))

    get_or_create.alters_data = True  # type: ignore[attr-defined]  # as Django marks it

    def update_or_create(self, **kwargs: Any) -> Any:
        # Overrides RelatedManager.update_or_create, which uses one alias.
        self._check_fk_val()
        return self._plain_manager_method("update_or_create")(**self._related(kwargs))

    update_or_create.alters_data = True  # type: ignore[attr-defined]  # as Django marks it

    def _check_fk_val(self) -> None:
        super()._check_fk_val()  # type: ignore[misc]  # of Django's manager

    def _begin_change(self) -> None:
        self._check_fk_val()
        self._remove_prefetched_objects()  # type: ignore[attr-defined]  # of Django's manager

    def _related(self, values: dict[str, Any]) -> dict[str, Any]:
        return {**values, self.field.name: self.instance}

    def _plain_manager_method(self, name: str) -> Any:
        """The method ``name`` of the model's own manager, the base of Django's related manager."""
        return getattr(super(self._django, self), name)

    def _check_type(self, obj: Any) -> None:
        if not isinstance(obj, self.model):
            raise TypeError(f"{self.model._meta.object_name!r} instance expected, got {obj!r}")

    def _pks_by_alias(self, objs: Iterable[Any]) -> dict[str, list[Any]]:
        """Primary keys of stored rows, by the alias of their shard."""
        by_alias: dict[str, list[Any]] = {}
        for obj in objs:
            alias = obj._state.db
            if obj._state.adding or runtime.topology().resolve(str(alias)) is None:
                raise ValueError(
                    f"{obj!r} instance isn't saved. Use bulk=False or save the object first."
                )
            by_alias.setdefault(alias, []).append(obj.pk)
        return by_alias

    def _atomic(self, *, several_statements: bool = True) -> AbstractContextManager[Any]:
        # A single statement needs no block.
        if not several_statements:
            return nullcontext()
        return transaction.atomic(using=self._options.group, savepoint=False)

    def _unbounded(self, method: str) -> ShardKeyRequired:
        options = self._options
        name = self.field.remote_field.get_accessor_name()
        key = options.key.name if options.key is not None else None
        change = f"update({self.field.name}=None)"
        return ShardKeyRequired(
            f"{method} of {name!r} is about rows of {self.model._meta.object_name} on any shard of group"
            f" {options.group!r}, and {describe(self.instance)} does not tell which. Use add() and"
            f" remove() with the rows, .filter({key}=…).{change} for those of one key, or"
            f" .scatter().{change} for all."
        )


class NullableFromOutside(FromOutside):
    """``person.photos`` of a foreign key that may be NULL."""

    def remove(self, *objs: Any, bulk: bool = True) -> None:
        # Overrides RelatedManager.remove.
        if not objs:
            return
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
                rows = self.using(alias).filter(pk__in=pks)  # type: ignore[attr-defined]  # of Django's manager
                if bulk:
                    rows.update(**{self.field.name: None})
                    continue
                for row in rows:
                    setattr(row, self.field.name, None)
                    row.save(update_fields=[self.field.name])

    remove.alters_data = True  # type: ignore[attr-defined]  # as Django marks it

    def clear(self, *, bulk: bool = True) -> None:
        # Overrides RelatedManager.clear.
        self._check_fk_val()
        raise self._unbounded("clear()")

    clear.alters_data = True  # type: ignore[attr-defined]  # as Django marks it

    def _alias_of(self, row: Any) -> str:
        # Django accepts a row that was not read, if it has a primary key.
        alias = colocated_alias(self._options, row)
        if alias is None:
            raise ShardKeyRequired(
                f"{describe(row)} is on no shard of group {self._options.group!r}: pass a row that is stored."
            )
        return alias
