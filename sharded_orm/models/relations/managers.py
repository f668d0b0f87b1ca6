"""Mixins that make Django's related managers find the right shards.

A related manager of Django asks the router for one alias, and passes the manager's instance as a
hint. This is right if the related rows are on the shard of the instance: see :class:`Beside` and
:class:`ManyBeside`. It is wrong if the instance is global or of another group: see
:class:`FromOutside`.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from django.db import router, transaction
from django.db.models import Model, Q

from sharded_orm import compat, runtime
from sharded_orm.exceptions import CrossShardRelation, ShardKeyRequired
from sharded_orm.models.sharding.bound_rows import refuse_other_key, related_rows_checked
from sharded_orm.models.sharding.current_shard import current_alias
from sharded_orm.models.sharding.options import (
    ShardOptions,
    colocated_alias,
    describe,
    shard_options,
)
from sharded_orm.models.sharding.same_key import key_for_related, refuse_two_keys, with_key
from sharded_orm.routing.where_clause import OnShard


class RelatedRows:
    """Base class of the mixins. It declares the attributes of Django's related managers that the
    mixins use.
    """

    instance: Any
    model: Any
    #: The foreign key. Managers of a many-to-many field or of a generic relation do not have this
    #: attribute.
    field: Any
    _db: str | None
    #: The relation, as Django describes it on the model that the field refers to.
    _rel: Any
    #: The class of Django's related manager, which comes after the mixin in the MRO.
    _django: type[Any]

    @property
    def _options(self) -> ShardOptions:
        options = shard_options(self.model)
        assert options is not None
        return options

    def _values_with_key(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return ``values`` for a new related row, with the shard key of the instance if the row needs
        the same key and ``values`` has none.
        """
        key = key_for_related(self.model, self._rel.field, self.instance)
        return with_key(self.model, key, values)


def _refuse_unrelatable(field: Any, instance: Any, rows: Iterable[Any]) -> None:
    """Raise :exc:`CrossShardRelation` if one of ``rows`` cannot be related to ``instance``, because it
    has another shard key, or is on another shard.

    Without this check, a different row could be changed: one that has the same id, but is on the
    shard of ``instance``.

    :param field: the foreign key or many-to-many field of the relation.
    """
    for row in rows:
        if isinstance(row, Model):
            refuse_two_keys(field, row, instance, load=True)
            refuse_other_key(row)
            router.allow_relation(row, instance)


class Beside(RelatedRows):
    """The manager of ``album.photos``, whose related rows are on the shard of the album.

    It refuses rows of other shards: Django compares primary keys only, and a row of another shard
    may have the same primary key as a row of this shard.
    """

    def add(self, *objs: Any, bulk: bool = True) -> None:
        # Overrides RelatedManager.add, to refuse rows of other shards before a transaction begins.
        _refuse_unrelatable(self._rel.field, self.instance, objs)
        super().add(*objs, bulk=bulk)  # type: ignore[misc]  # of Django's manager

    add.alters_data = True  # type: ignore[attr-defined]  # as Django marks it

    def set(self, objs: Iterable[Any], *, bulk: bool = True, clear: bool = False) -> None:
        # Overrides RelatedManager.set (create_reverse_many_to_one_manager), to refuse rows of other shards.
        objs = tuple(objs)
        _refuse_unrelatable(self._rel.field, self.instance, objs)
        super().set(objs, bulk=bulk, clear=clear)  # type: ignore[misc]  # of Django's manager

    set.alters_data = True  # type: ignore[attr-defined]  # as Django marks it

    def create(self, **kwargs: Any) -> Any:
        # Overrides RelatedManager.create(): a related row has the shard key of the instance.
        return super().create(**self._values_with_key(kwargs))  # type: ignore[misc]  # of Django's manager

    create.alters_data = True  # type: ignore[attr-defined]  # as Django marks it

    def get_or_create(self, **kwargs: Any) -> Any:
        # Overrides RelatedManager.get_or_create(): a related row has the shard key of the instance.
        return super().get_or_create(**self._values_with_key(kwargs))  # type: ignore[misc]  # of Django's manager

    get_or_create.alters_data = True  # type: ignore[attr-defined]  # as Django marks it

    def update_or_create(self, **kwargs: Any) -> Any:
        # Overrides RelatedManager.update_or_create(): a related row has the shard key of the
        # instance.
        return super().update_or_create(**self._values_with_key(kwargs))  # type: ignore[misc]  # of Django's manager

    update_or_create.alters_data = True  # type: ignore[attr-defined]  # as Django marks it


class NullableBeside(Beside):
    """The manager of ``album.photos`` if the foreign key may be NULL; it has ``remove()`` too."""

    def remove(self, *objs: Any, bulk: bool = True) -> None:
        # Overrides RelatedManager.remove, to refuse rows of other shards.
        _refuse_unrelatable(self._rel.field, self.instance, objs)
        super().remove(*objs, bulk=bulk)  # type: ignore[misc]  # of Django's manager

    remove.alters_data = True  # type: ignore[attr-defined]  # as Django marks it


class ManyBeside(RelatedRows):
    """The manager of ``photo.tags`` and of the other side, ``tag.photos``.

    The photo, its tags and the rows of the many-to-many table between them are on one shard.
    """

    through: Any
    target_field: Any
    target_field_name: str

    def _apply_rel_filters(self, queryset: Any) -> Any:
        # Overrides ManyRelatedManager._apply_rel_filters(), which compares the instance's primary
        # key only. Add a condition on the instance's shard too, so that later filters cannot lead
        # to another shard, where another row may have this primary key. add_q() changes the
        # queryset in place, which is safe: _RelatedManager passes a copy of the caller's queryset.
        # If the rows have the shard key of the instance, the condition on the key names the shard, also
        # after the key has moved.
        if key_for_related(self.model, self._rel.field, self.instance):
            return super()._apply_rel_filters(queryset)  # type: ignore[misc]  # of Django's manager
        alias = colocated_alias(self._options, self.instance)
        if alias is not None:
            queryset.query.add_q(Q(OnShard(alias)))
        return super()._apply_rel_filters(queryset)  # type: ignore[misc]  # of Django's manager

    def add(self, *objs: Any, through_defaults: Any = None) -> None:
        # Overrides ManyRelatedManager.add(), which inserts rows of the many-to-many table by INSERT
        # IGNORE. If such a row referred to a row of another shard, MariaDB would leave it out
        # without an error. So first check the rows that are to be related.
        self._check_targets(objs)
        super().add(*objs, through_defaults=self._through_with_key(through_defaults))  # type: ignore[misc]  # of Django's manager

    add.alters_data = True  # type: ignore[attr-defined]  # as Django marks it

    def set(
        self, objs: Iterable[Any], *, clear: bool = False, through_defaults: Any = None
    ) -> None:
        # Overrides ManyRelatedManager.set(), as set_base() does.
        self.set_base(objs, clear=clear, through_defaults=through_defaults)

    set.alters_data = True  # type: ignore[attr-defined]  # as Django marks it

    def set_base(
        self,
        objs: Iterable[Any],
        *,
        clear: bool = False,
        through_defaults: Any = None,
        raw: bool = False,
    ) -> None:
        # Overrides ManyRelatedManager.set_base() (Django 6.1), which deserializers call. Django
        # removes old rows before it checks the new ones. Check the new ones first.
        objs = tuple(objs)
        self._check_targets(objs)
        through_defaults = self._through_with_key(through_defaults)
        compat.set_base(super(), objs, clear=clear, through_defaults=through_defaults, raw=raw)

    set_base.alters_data = True  # type: ignore[attr-defined]  # as Django marks set()

    def remove(self, *objs: Any) -> None:
        # Overrides ManyRelatedManager.remove(), which compares primary keys only. Refuse rows of
        # other shards: they may have the same primary keys.
        _refuse_unrelatable(self._rel.field, self.instance, objs)
        super().remove(*objs)  # type: ignore[misc]  # of Django's manager

    remove.alters_data = True  # type: ignore[attr-defined]  # as Django marks it

    def create(self, *, through_defaults: Any = None, **kwargs: Any) -> Any:
        # Overrides ManyRelatedManager.create(): a related row, and the row of an explicit
        # many-to-many table, have the shard key of the instance.
        through_defaults = self._through_with_key(through_defaults)
        return super().create(through_defaults=through_defaults, **self._values_with_key(kwargs))  # type: ignore[misc]  # of Django's manager

    create.alters_data = True  # type: ignore[attr-defined]  # as Django marks it

    def get_or_create(self, *, through_defaults: Any = None, **kwargs: Any) -> Any:
        # Overrides ManyRelatedManager.get_or_create(), as create() does.
        through_defaults = self._through_with_key(through_defaults)
        values = self._values_with_key(kwargs)
        return super().get_or_create(through_defaults=through_defaults, **values)  # type: ignore[misc]  # of Django's manager

    get_or_create.alters_data = True  # type: ignore[attr-defined]  # as Django marks it

    def update_or_create(self, *, through_defaults: Any = None, **kwargs: Any) -> Any:
        # Overrides ManyRelatedManager.update_or_create(), as create() does.
        through_defaults = self._through_with_key(through_defaults)
        values = self._values_with_key(kwargs)
        return super().update_or_create(through_defaults=through_defaults, **values)  # type: ignore[misc]  # of Django's manager

    update_or_create.alters_data = True  # type: ignore[attr-defined]  # as Django marks it

    def _add_items(self, *args: Any, **kwargs: Any) -> None:
        # Overrides ManyRelatedManager._add_items(), which inserts the rows of the many-to-many table
        # by ids. _check_targets() has compared the keys of the rows that they relate.
        with related_rows_checked():
            super()._add_items(*args, **kwargs)  # type: ignore[misc]  # of Django's manager

    def _through_with_key(self, values: Any) -> Any:
        # A value of through_defaults may be callable, which Django evaluates for each row.
        key = key_for_related(self.through, self._rel.field, self.instance)
        return with_key(self.through, key, values or {}) if key else values

    def _check_targets(self, objs: Any) -> None:
        # Raise errors about ``objs`` before Django opens a transaction. An error inside the
        # transaction would make the transaction unusable.
        _refuse_unrelatable(self._rel.field, self.instance, objs)
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
        key = key_for_related(self.model, self._rel.field, self.instance)
        rows = self.model._base_manager.using(alias).filter(**{f"{column}__in": values}, **key)
        absent = values.difference(rows.values_list(column, flat=True))
        if absent:
            name = self.model._meta.object_name
            raise CrossShardRelation(
                f"{describe(self.instance)} is on shard {alias!r}, where there is no {name} with"
                f" {column} in {sorted(absent, key=repr)!r}: rows of one group can only be related on one"
                " shard. Relate it to rows that are stored and have the same shard key."
            )


class FromOutside(RelatedRows):
    """The manager of ``person.photos``, if the person is global or of another group than the
    photos.

    The photos may be on any shard. If their foreign key to the person is the shard key, all photos
    of one person are on one shard. Otherwise the shard key of each photo, or a condition of the
    caller, names the shard. The manager does not ask the router, which does not know the relation.
    """

    core_filters: dict[str, Any]

    def _apply_rel_filters(self, queryset: Any) -> Any:
        # Overrides RelatedManager._apply_rel_filters() with a copy of Django's code. The copy omits
        # one case, databases that store an empty string as NULL, because no such database can have
        # shards.
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
        # Overrides RelatedManager.add(), which updates rows on one alias only. Here the rows may be
        # on several shards.
        self._begin_change()
        for obj in objs:
            self._check_type(obj)
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
        # Leave out the shard key. It has not changed: a change has been refused.
        key = self._options.key
        changes = {name: value for name, value in values.items() if not key or name != key.name}
        if changes:
            with self._atomic(several_statements=len(by_alias) > 1):
                for alias, pks in by_alias.items():
                    rows = self.model._base_manager.using(alias).filter(pk__in=pks)
                    rows.update(**changes)

    add.alters_data = True  # type: ignore[attr-defined]  # as Django marks it

    def set(self, objs: Iterable[Any], *, bulk: bool = True, clear: bool = False) -> None:
        # Overrides RelatedManager.set(), which works on one alias only. If the foreign key may be
        # NULL, set() would also have to remove the old rows, which may be on any shard. So set() is
        # refused for such a foreign key.
        if self.field.null:
            raise self._unbounded("set()")
        self.add(*tuple(objs), bulk=bulk)

    set.alters_data = True  # type: ignore[attr-defined]  # as Django marks it

    def create(self, **kwargs: Any) -> Any:
        # Overrides RelatedManager.create(), which asks the router for an alias. Here the key of the
        # new row names the shard.
        self._begin_change()
        return self._plain_manager_method("create")(**self._related(kwargs))

    create.alters_data = True  # type: ignore[attr-defined]  # as Django marks it

    def get_or_create(self, **kwargs: Any) -> Any:
        # Overrides RelatedManager.get_or_create(), which asks the router for an alias. Here the
        # values to look up, such as the shard key, name the shard.
        self._check_fk_val()
        return self._plain_manager_method("get_or_create")(**self._related(kwargs))

    get_or_create.alters_data = True  # type: ignore[attr-defined]  # as Django marks it

    def update_or_create(self, **kwargs: Any) -> Any:
        # Overrides RelatedManager.update_or_create(), which asks the router for an alias. Here the
        # values to look up, such as the shard key, name the shard.
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
        """Return the method with this name of the model's own manager, such as ``create()``.

        Plain ``super()`` would find the method of Django's related manager, which comes before the
        model's own manager in the MRO.
        """
        return getattr(super(self._django, self), name)

    def _check_type(self, obj: Any) -> None:
        if not isinstance(obj, self.model):
            raise TypeError(f"{self.model._meta.object_name!r} instance expected, got {obj!r}")
        refuse_other_key(obj)

    def _pks_by_alias(self, objs: Iterable[Any]) -> dict[str, list[Any]]:
        """Return the primary keys of ``objs``, keyed by the alias of their shard.

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
        """Return the name of this manager, and the method of a queryset that removes all rows."""
        return self.field.remote_field.get_accessor_name(), f"update({self.field.name}=None)"


class NullableFromOutside(FromOutside):
    """The manager of ``person.photos`` if the foreign key may be NULL; see :class:`FromOutside`."""

    def remove(self, *objs: Any, bulk: bool = True) -> None:
        # Overrides RelatedManager.remove(), which works on one alias only. Here the rows may be on
        # several shards.
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
        # Overrides RelatedManager.clear(), which works on one alias only. Here the rows may be on
        # any shard, so clear() is refused.
        self._check_fk_val()
        raise self._unbounded("clear()")

    clear.alters_data = True  # type: ignore[attr-defined]  # as Django marks it

    def _alias_of(self, row: Any) -> str:
        # Accept a row that was not read from a database, if its values tell its shard: Django, too,
        # accepts an instance that was not read, if it has a primary key.
        alias = colocated_alias(self._options, row)
        if alias is None:
            raise ShardKeyRequired(
                f"{describe(row)} is on no shard of group {self._options.group!r}: pass a row that is stored."
            )
        return alias
