"""The base class of models whose rows are on shards: :class:`ShardedModel`."""

from __future__ import annotations

from typing import Any, ClassVar

from django.db import models

from sharded_orm import compat, runtime
from sharded_orm.cache import request_cache
from sharded_orm.exceptions import ShardKeyChanged, ShardKeyRequired
from sharded_orm.models.cached.cached_model import cached_model
from sharded_orm.models.cached.model_cache import CacheAttribute
from sharded_orm.models.cached.saves import save_cached_row, save_loaded_cached_row
from sharded_orm.models.cached.write_tracking import writing
from sharded_orm.models.fields.generated_id import (
    forget_shard_choice,
    generated_id_fields,
    insert_with_ids,
)
from sharded_orm.models.moves.confirmation import confirmed
from sharded_orm.models.moves.repetition import repeated
from sharded_orm.models.plans.inserts import insert_row
from sharded_orm.models.plans.saves import (
    SavedRows,
    SavedTable,
    save_loaded_row,
    save_row,
)
from sharded_orm.models.plans.stored_rows import SaveMethods, save_stored_row
from sharded_orm.models.plans.switch import are_write_plans_on
from sharded_orm.models.querysets.route import colocation_on
from sharded_orm.models.querysets.sharded import ShardedManager, ShardedQuerySet
from sharded_orm.models.relations.model_class import ShardedModelBase
from sharded_orm.models.relations.order import neighbour_in_order
from sharded_orm.models.row_validation import RowValidation
from sharded_orm.models.sharding import row_placement, statements
from sharded_orm.models.sharding.bound_key import key_in_force, unbound
from sharded_orm.models.sharding.bound_rows import give_bound_key, refuse_other_key
from sharded_orm.models.sharding.current_shard import current_alias, is_of_other_key
from sharded_orm.models.sharding.generic_keys import check_references
from sharded_orm.models.sharding.kept_shard import KeptShard, keep_shard
from sharded_orm.models.sharding.key_errors import shard_key_required
from sharded_orm.models.sharding.options import ShardOptions, shard_options
from sharded_orm.models.sharding.rewritten_keys import refuse_rewritten_keys
from sharded_orm.models.sharding.same_key import are_of_two_keys
from sharded_orm.models.sharding.shard_refusals import (
    refuse_near_on_other_shard,
    refuse_other_shard,
    refuse_relations_to_other_shards,
)
from sharded_orm.models.sharding.statements import check_insert, check_update, has_expressions


class ShardedModel(RowValidation, metaclass=ShardedModelBase):
    """A model whose rows live on the logical shards of a group.

    A group is a numbered set of shards with one routing strategy, which finds the shard of a key.

    ::

        class Photo(ShardedModel):
            user_id = models.BigIntegerField()

            class ShardMeta:
                group = "photos"
                shard_key = "user_id"

    ``ShardMeta`` is inherited like ``Meta``. A row is always stored on the shard that its shard key
    determines. ``save()`` never changes the key of a stored row (:exc:`ShardKeyChanged`).
    """

    _is_sharded: ClassVar[bool] = True
    #: True if only the library uses the primary keys of this model. Rows of two shards may then
    #: have the same id, because each shard counts from 1.
    ids_are_internal: ClassVar[bool] = False

    cache = CacheAttribute()
    objects = ShardedManager()

    class Meta:
        abstract = True

    def __eq__(self, other: object) -> bool:
        # Rows of two shards may have equal primary keys, so compare the shard keys, too.
        is_equal = super().__eq__(other)
        return is_equal if is_equal is not True else not are_of_two_keys(self, other)

    def __hash__(self) -> int:  # a class that defines __eq__() does not inherit it
        return super().__hash__()

    def save(self, *args: Any, **kwargs: Any) -> None:
        give_bound_key(self)

        def write() -> None:
            kept = (
                None
                if args
                else save_stored_row(self, _save_methods, kwargs, save_loaded_cached_row)
            )
            if kept is True:
                return
            with keep_shard(self, kept):
                super(ShardedModel, self).save(*args, **kwargs)

        repeated(self._shard_options().group, write)

    save.alters_data = True  # type: ignore[attr-defined]  # as on Django's method

    @classmethod
    def _shard_options(cls) -> ShardOptions:
        options = shard_options(cls)
        if options is None:
            raise ShardKeyRequired(
                f"{cls.__qualname__} has no class ShardMeta; it must name group and shard_key."
            )
        return options

    def save_base(
        self,
        raw: bool = False,
        force_insert: Any = False,
        force_update: bool = False,
        using: str | None = None,
        update_fields: Any = None,
    ) -> None:
        # Overrides Model.save_base(). Every save() first chooses the database alias, and then calls
        # this method. The override first checks that the row belongs on this shard.
        refuse_other_key(self)
        options = self._shard_options()
        using = self._write_alias(options, using)
        refuse_relations_to_other_shards(options, self, using, update_fields)
        refuse_near_on_other_shard(options, self, using)
        # Check the expressions among the row's values here, because an error after the transaction
        # has begun would make it unusable. Lazy objects, which pre_save may replace, are checked later.
        if has_expressions(self):
            check_update(colocation_on(options, using), [self], update_fields, lazy=False)
        if self._state.adding and not raw:
            check_references(using, [self])
        with writing(self):
            # By name, as Model.save() does: the method of the next base class, which may belong to
            # another package, may have other positions.
            super().save_base(
                raw=raw,
                force_insert=force_insert,
                force_update=force_update,
                using=using,
                update_fields=update_fields,
            )
        if options.key_is_generated:
            forget_shard_choice([self])

    def delete(
        self, using: str | None = None, keep_parents: bool = False, **kwargs: Any
    ) -> tuple[int, dict[str, int]]:
        # The next base class may belong to another package, whose delete() has other parameters:
        # that of a package for soft deletion may not have keep_parents, and may return any value.
        refuse_other_key(self)
        refuse_rewritten_keys(self.__class__)
        options = self._shard_options()
        if keep_parents:
            kwargs["keep_parents"] = keep_parents

        def write() -> tuple[int, dict[str, int]]:
            alias = self._write_alias(options, using)
            with writing(self):
                return super(ShardedModel, self).delete(using=alias, **kwargs)

        return repeated(
            options.group,
            write,
            nothing_written=lambda counts: isinstance(counts, tuple) and not counts[0],
        )

    delete.alters_data = True  # type: ignore[attr-defined]  # as on Django's method

    def _write_alias(self, options: ShardOptions, using: str | None) -> str:
        if using is not None and using != options.group:
            self._refuse_other_shard(using)
            return using
        if not self._state.adding and self._state.db not in (None, options.group):
            alias = str(current_alias(options, self))
            self._refuse_other_shard(alias)
            return alias
        return row_placement.place(options, self).alias

    def _refuse_other_shard(self, alias: str) -> None:
        # Automatic many-to-many tables have a method of this name, too.
        refuse_other_shard(self._shard_options(), self, alias)

    def _save_table(
        self,
        raw: bool = False,
        cls: Any = None,
        force_insert: Any = False,
        force_update: bool = False,
        using: str | None = None,
        update_fields: Any = None,
    ) -> bool:
        # Overrides Model._save_table(). save_base() has checked the shard, but a receiver of
        # pre_save may have changed the key since, and Django's deserializer bypasses save_base().
        # So check the shard here, too. A row without an id is new, so skip the UPDATE that Django
        # would try before the INSERT.
        refuse_other_key(self)
        self._refuse_other_shard(str(using))
        if not (raw or force_update or update_fields) and self._state.adding:
            force_insert = force_insert or not cls._meta.pk or self._get_pk_val(cls._meta) is None
        is_updated = None
        if self._has_found_none() and cached_model(cls) is None:
            is_updated = False
        elif not (raw or force_insert or self._state.adding):
            is_updated = self._update_by_plan(cls, str(using), update_fields)
            if is_updated:
                return True
        table = SavedTable(cls, is_row_missing=is_updated is False)
        return bool(
            super()._save_table(raw, table, force_insert, force_update, using, update_fields)  # type: ignore[misc]  # not in the stubs
        )

    def _has_found_none(self) -> bool:
        """Whether save() has sent the UPDATE already, and the UPDATE has found no row."""
        kept: KeptShard | None = self._state.__dict__.get("kept_shard")
        return kept is not None and kept.has_found_none

    def _update_by_plan(self, cls: Any, using: str, update_fields: Any) -> bool | None:
        """Update the row without Django's ``_save_table()``, and return whether a row matched.

        Return None, without sending anything, if no plan (an UPDATE that was compiled once) fits.
        """
        model: Any = type(self)
        if (
            cls is not model._meta.concrete_model
            or model._meta.select_on_save
            or model._do_update is not ShardedModel._do_update
            or model._get_pk_val is not models.Model._get_pk_val
            or model._is_pk_set is not models.Model._is_pk_set
            or not are_write_plans_on()
            or cached_model(cls) is not None
        ):
            return None
        return save_loaded_row(self._shard_options(), cls, self, using, update_fields)

    def _do_insert(
        self, manager: Any, using: str | None, fields: Any, returning_fields: Any, raw: bool
    ) -> Any:
        # Overrides Model._do_insert(). A field that generates ids, such as a PackedIDField, must
        # execute the INSERT. insert_with_ids() lets it do so. If plans (INSERTs that are compiled
        # once) are off, ShardedQuerySet._insert() calls insert_with_ids().
        options = self._shard_options()
        manager = manager.manager if isinstance(manager, SavedTable) else manager
        options.refuse_key_changed_on_insert(self)
        if has_expressions(self):
            check_insert(colocation_on(options, str(using)), [self])
        if generated_id_fields(manager.model):
            if are_write_plans_on():
                return insert_with_ids(
                    manager.model,
                    [self],
                    str(using),
                    returning_fields or (),
                    lambda returning: insert_row(
                        manager.model, self, fields, returning, raw, str(using)
                    ),
                )
            rows: Any = ShardedQuerySet(manager.model)
            return rows._insert([self], fields, returning_fields, raw, using)
        if type(manager) is models.Manager and are_write_plans_on():
            return insert_row(manager.model, self, fields, returning_fields, raw, str(using))
        insert = super()._do_insert  # type: ignore[misc]  # not in the stubs
        return insert(manager, using, fields, returning_fields, raw)

    def _do_update(
        self,
        base_qs: Any,
        using: str | None,
        pk_val: Any,
        values: Any,
        update_fields: Any,
        forced_update: Any,
        *returning_fields: Any,
    ) -> Any:
        # Overrides Model._do_update(). Add the shard key to the conditions of the UPDATE, and do
        # not write it. If the key was changed in memory, the UPDATE finds no row, so no row can get
        # onto the wrong shard. Like Django's method, return a true value if a row was updated
        # (since Django 6.0, the values of ``returning_fields``).
        options = self._shard_options()
        if statements.has_lazy(values):
            check_update(colocation_on(options, str(using)), [self], update_fields)
        key = options.key
        update: Any = super()._do_update
        if key is None or key.model._meta.concrete_model is not base_qs.model._meta.concrete_model:
            # This UPDATE is for the table of a parent model, which may have no column for the shard
            # key. So add no condition on the key.
            return update(
                base_qs, using, pk_val, values, update_fields, forced_update, *returning_fields
            )
        others = [value for value in values if value[0] is not key]
        key_value, row_exists = None, None
        if isinstance(base_qs, SavedRows) and base_qs.is_row_missing:
            row_exists = False  # _update_by_plan() has sent the UPDATE, which found no row.
        elif key.attname in self.__dict__:
            key_value = options.key_of(self)
            if (
                others
                and isinstance(base_qs, SavedRows)
                and not any(returning_fields)
                and (forced_update or not self._meta.select_on_save)
                and are_write_plans_on()
            ):
                parts = (options, base_qs, key_value, pk_val, others, update_fields)
                cached = cached_model(base_qs.model)
                if cached is None:
                    row_exists = save_row(*parts)
                elif not self._has_found_none():
                    row_exists = save_cached_row(cached, *parts, self.__dict__)
        if row_exists is not None:
            updated = compat.update_result(row_exists)
        else:
            same_key = base_qs
            if key_value is not None:
                same_key = base_qs.filter(**{key.attname: key_value})
            if values and not others:
                # Only the shard key is to be saved, which is never written. Django would report
                # success without a query, so check that the row exists.
                updated = compat.update_result(same_key.filter(pk=pk_val).exists())
            else:
                updated = update(
                    same_key, using, pk_val, others, update_fields, forced_update, *returning_fields
                )
        if (
            not updated
            and not self._state.adding
            and is_of_other_key(options, self, base_qs, pk_val)
        ):
            raise ShardKeyChanged(
                f"The row with pk={pk_val!r} on {using!r} has another {key.name} than"
                f" {options.key_of(self)!r}. The key of a row never changes by save(): create the row"
                " under the new key and delete the old one."
            )
        return updated

    def refresh_from_db(
        self, using: str | None = None, fields: Any = None, from_queryset: Any = None
    ) -> None:
        options = self._shard_options()
        if options.key is None or options.key.attname not in self.get_deferred_fields():
            refuse_other_key(self)

        def read() -> None:
            # If using() was not called on from_queryset, let it read from the shard of this row.
            alias, on_shard = current_alias(options, self), using
            if from_queryset is not None and using is None and from_queryset._db is None:
                on_shard = alias if runtime.topology().resolve(str(alias)) is not None else None
            # The project's base manager might read through the cache, or filter by the bound key
            # (the key that bound() adds to every query). Turn both off.
            with request_cache.uncached(), unbound():
                super(ShardedModel, self).refresh_from_db(
                    using=on_shard, fields=fields, from_queryset=from_queryset
                )

        confirmed(options.group, read)

    def _get_next_or_previous_by_FIELD(self, field: Any, is_next: bool, **kwargs: Any) -> Any:
        # get_next_by_FOO() and get_previous_by_FOO() call this method. It searches only the shard
        # of this row, which lacks rows of most other shard keys. So the caller must pass the shard
        # key of this row as a condition.
        refuse_other_key(self)
        if (bound_key := key_in_force(type(self))) is not None:
            kwargs.setdefault(bound_key.name, bound_key.value)
        options = self._shard_options()
        key = options.key
        if key is not None and getattr(self, key.attname) not in (
            kwargs.get(key.attname),
            getattr(kwargs.get(key.name), "pk", kwargs.get(key.name)),
        ):
            name = f"get_{'next' if is_next else 'previous'}_by_{field.name}"
            raise shard_key_required(
                options, f"{name}() compares rows of one key: pass {key.name}= of this row"
            )
        return super()._get_next_or_previous_by_FIELD(field, is_next, **kwargs)  # type: ignore[misc]  # not in the stubs

    def _get_next_or_previous_in_order(self, is_next: bool) -> Any:
        # get_next_in_order() and get_previous_in_order() call this. Keep the result, as Django does.
        refuse_other_key(self)
        if (name := f"__{is_next}_order_cache") not in self.__dict__:
            setattr(self, name, neighbour_in_order(self, is_next=is_next))
        return self.__dict__[name]


_save_methods = SaveMethods(ShardedModel)
