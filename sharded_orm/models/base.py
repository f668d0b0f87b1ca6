"""The base classes of models: :class:`ShardedModel` and :class:`GlobalModel`."""

from __future__ import annotations

from typing import Any, ClassVar, Self

from django.db import models
from django.db.models.base import ModelBase

from sharded_orm import runtime
from sharded_orm.exceptions import CrossShardRelation, ShardKeyChanged, ShardKeyRequired
from sharded_orm.models.colocation import check_colocated
from sharded_orm.models.options import ShardOptions, describe, shard_options
from sharded_orm.models.query import ShardedManager
from sharded_orm.models.relations import install_descriptors
from sharded_orm.models.routes import scoped


class ShardedModelBase(ModelBase):
    """Finishes the class of a sharded model once Django has made it."""

    def __new__(
        mcs, name: str, bases: tuple[type, ...], attrs: dict[str, Any], **kwargs: Any
    ) -> Any:
        cls: Any = super().__new__(mcs, name, bases, attrs, **kwargs)
        if not cls._meta.abstract:
            install_descriptors(cls)
        return cls


class ShardedModel(models.Model, metaclass=ShardedModelBase):
    """A model whose rows live on the logical shards of a group.

    ::

        class Photo(ShardedModel):
            user_id = models.BigIntegerField()

            class ShardMeta:
                group = "photos"
                shard_key = "user_id"

    ``ShardMeta`` is inherited like ``Meta``. The shard key decides where a row is; it
    never changes by ``save()`` (:exc:`ShardKeyChanged`). A new row is stored where its
    key is placed, whatever alias Django would have chosen.
    """

    _is_sharded: ClassVar[bool] = True

    objects = ShardedManager()

    class Meta:
        abstract = True

    @classmethod
    def _shard_options(cls) -> ShardOptions:
        options = shard_options(cls)
        if options is None:
            raise ShardKeyRequired(
                f"{cls.__qualname__} has no class ShardMeta; it must name group and shard_key."
            )
        return options

    # -- Writing ---------------------------------------------------------------

    def save_base(
        self,
        raw: bool = False,
        force_insert: Any = False,
        force_update: bool = False,
        using: str | None = None,
        update_fields: Any = None,
    ) -> None:
        # Overrides Model.save_base: the last point that every save passes, fixtures
        # included, with the alias chosen.
        options = self._shard_options()
        if using is None or using == options.group:
            using = self._home(options)
        else:
            self._refuse_other_shard(using)
        super().save_base(raw, force_insert, force_update, using, update_fields)

    def delete(
        self, using: str | None = None, keep_parents: bool = False
    ) -> tuple[int, dict[str, int]]:
        options = self._shard_options()
        if using is None or using == options.group:
            using = self._home(options)
        self._refuse_other_shard(using)
        return super().delete(using=using, keep_parents=keep_parents)

    delete.alters_data = True  # type: ignore[attr-defined]

    def _home(self, options: ShardOptions) -> str:
        if not self._state.adding and self._state.db not in (None, options.group):
            alias = str(self._state.db)
            self._refuse_other_shard(alias)
            return alias
        return options.place(self).alias

    def _refuse_other_shard(self, alias: str) -> None:
        """Raise unless the shard key of this instance belongs on ``alias``."""
        options = self._shard_options()
        if options.key is not None and options.key.attname in self.get_deferred_fields():
            return  # Not loaded, so not changed.
        home = runtime.topology().resolve(alias)
        if home is None and runtime.template_group(alias) == options.group:
            return
        shard = options.locate(self)
        if shard is None and self._state.adding:
            shard = options.place(self)
        if shard is not None and shard.alias == alias:
            return
        name, key = options.key.name if options.key is not None else None, options.key_of(self)
        where = f"shard {shard.alias!r}" if shard is not None else "no shard yet"
        if not self._state.adding:
            raise ShardKeyChanged(
                f"{describe(self)} was read from {alias!r}, but its shard key {name}={key!r} is on {where}. The"
                " key of a row never changes by save(): create the row under the new key and"
                " delete this one."
            )
        raise CrossShardRelation(
            f"{describe(self)} cannot be saved on {alias!r}: its shard key {name}={key!r} is on {where}."
            " Leave out using=, and relate it only to rows with the same shard key."
        )

    def _save_table(
        self,
        raw: bool = False,
        cls: Any = None,
        force_insert: Any = False,
        force_update: bool = False,
        using: str | None = None,
        update_fields: Any = None,
    ) -> bool:
        # Overrides Model._save_table: a row whose id is drawn here is new, so the
        # UPDATE that Django tries first could only miss.
        if not (raw or force_update or update_fields) and self._state.adding:
            force_insert = force_insert or not cls._meta.pk or self._get_pk_val(cls._meta) is None
        return bool(
            super()._save_table(raw, cls, force_insert, force_update, using, update_fields)  # type: ignore[misc]
        )

    def _do_update(
        self,
        base_qs: Any,
        using: str | None,
        pk_val: Any,
        values: Any,
        update_fields: Any,
        forced_update: Any,
    ) -> bool:
        # Overrides Model._do_update: the shard key is a condition, not a value. A row
        # whose key was changed in memory is not found instead of being misplaced.
        options = self._shard_options()
        key = options.key
        if key is None or key.model._meta.concrete_model is not base_qs.model._meta.concrete_model:
            # The table of a parent that does not hold the key.
            return bool(
                super()._do_update(base_qs, using, pk_val, values, update_fields, forced_update)
            )
        values = [value for value in values if value[0] is not key]
        same_key = base_qs
        if key.attname not in self.get_deferred_fields():
            same_key = base_qs.filter(**{key.attname: options.key_of(self)})
        updated = bool(
            super()._do_update(same_key, using, pk_val, values, update_fields, forced_update)
        )
        if not updated and not self._state.adding and base_qs.filter(pk=pk_val).exists():
            raise ShardKeyChanged(
                f"The row with pk={pk_val!r} on {using!r} has another {key.name} than"
                f" {options.key_of(self)!r}. The key of a row never changes by save(): create the row"
                " under the new key and delete the old one."
            )
        return updated

    # -- Validation ------------------------------------------------------------

    def _perform_unique_checks(self, unique_checks: Any) -> Any:
        # Overrides Model._perform_unique_checks: unique on this row's shard. The checks
        # of a key without rows find nothing by definition.
        alias = self._validation_alias()
        if alias is None:
            return {}
        with scoped(alias):
            return super()._perform_unique_checks(unique_checks)  # type: ignore[misc]

    def _perform_date_checks(self, date_checks: Any) -> Any:
        alias = self._validation_alias()
        if alias is None:
            return {}
        with scoped(alias):
            return super()._perform_date_checks(date_checks)  # type: ignore[misc]

    def validate_constraints(self, exclude: Any = None) -> None:
        # Overrides Model.validate_constraints, which asks the router and so would place
        # the key of a row that is only being validated.
        if self._validation_alias() is not None:
            super().validate_constraints(exclude)

    def _validation_alias(self) -> str | None:
        options = self._shard_options()
        if not self._state.adding and self._state.db not in (None, options.group):
            return str(self._state.db)
        if options.key is None or getattr(self, options.key.attname) is None:
            return None
        shard = options.locate(self)
        return shard.alias if shard is not None else None


class GlobalQuerySet(models.QuerySet[Any, Any]):
    """The queryset of global models, with the methods that sharded ones have (Y1).

    A join to a sharded model raises :exc:`CrossShardRelation`.
    """

    @property
    def db(self) -> str:
        check_colocated(self.query, None)
        return super().db

    def scatter(self, *, partial: bool = False) -> Self:
        """The same query: there is one database to ask."""
        return self._chain()  # type: ignore[no-any-return,attr-defined]

    def explain_routing(self) -> str:
        """Which alias the query would run on."""
        return f"the global database, alias {self.db!r}"


GlobalManager = models.Manager.from_queryset(GlobalQuerySet, class_name="GlobalManager")


class GlobalModel(models.Model):
    """A model of the global database: data that belongs to no shard key (Y1)."""

    _is_sharded: ClassVar[bool] = False

    objects = GlobalManager()

    class Meta:
        abstract = True
