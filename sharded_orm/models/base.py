"""The base class of models whose rows are on shards: :class:`ShardedModel`."""

from __future__ import annotations

from typing import Any, ClassVar

from django.apps import apps
from django.db import models
from django.db.models.base import ModelBase

from sharded_orm import compat, database_settings, runtime
from sharded_orm.cache import request_cache
from sharded_orm.exceptions import CrossShardRelation, ShardKeyChanged, ShardKeyRequired
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
from sharded_orm.models.relations.descriptors import install_descriptors
from sharded_orm.models.relations.forms import install_relations_in_forms
from sharded_orm.models.relations.order import install_order, neighbour_in_order
from sharded_orm.models.relations.through import install_through
from sharded_orm.models.row_validation import RowValidation
from sharded_orm.models.sharding import row_placement, statements
from sharded_orm.models.sharding.bound_key import key_in_force, unbound
from sharded_orm.models.sharding.bound_rows import give_bound_key, refuse_other_key
from sharded_orm.models.sharding.current_shard import current_alias, is_of_other_key
from sharded_orm.models.sharding.generic_keys import check_references
from sharded_orm.models.sharding.kept_shard import KeptShard, keep_shard
from sharded_orm.models.sharding.key_errors import describe, shard_key_required
from sharded_orm.models.sharding.key_validation import install_key_validation
from sharded_orm.models.sharding.options import ShardOptions, options_of, shard_options
from sharded_orm.models.sharding.rewritten_keys import refuse_rewritten_keys
from sharded_orm.models.sharding.row_placement import colocated_alias
from sharded_orm.models.sharding.same_key import are_of_two_keys, refuse_related_of_other_key
from sharded_orm.models.sharding.statements import check_insert, check_update, has_expressions
from sharded_orm.topology.model import Shard


class ShardedModelBase(ModelBase):
    """The metaclass of sharded models.

    It installs this library's descriptors and managers, instead of Django's, for the relations and
    the automatic many-to-many tables of a model. It also makes the model's forms and serializers
    report an error if somebody changes the shard key of a stored row.
    """

    def __new__(
        mcs, name: str, bases: tuple[type, ...], attrs: dict[str, Any], **kwargs: Any
    ) -> Any:
        if "ShardMeta" in attrs:
            for config in apps.get_app_configs():
                # An installed app may add fields to each class that has a ShardMeta. Its AppConfig
                # then has a method fields_of_sharded_model().
                if (fields_of := getattr(config, "fields_of_sharded_model", None)) is not None:
                    attrs = {**attrs, **fields_of(name, attrs)}
        cls: Any = super().__new__(mcs, name, bases, attrs, **kwargs)
        if not cls._meta.abstract:
            install_descriptors(cls)
            install_through(cls)
            install_key_validation(cls)
            install_relations_in_forms(cls)
            install_order(cls)
        return cls


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
        self._refuse_relations_to_other_shards(options, using, update_fields)
        self._refuse_near_on_other_shard(options, using)
        # Check the expressions among the row's values now, because an error inside the transaction
        # would make the transaction unusable. Lazy objects are checked later, because a receiver of
        # pre_save may replace them.
        if has_expressions(self):
            check_update(colocation_on(options, using), [self], update_fields, lazy=False)
        if self._state.adding and not raw:
            check_references(using, [self])
        with writing(self):
            super().save_base(raw, force_insert, force_update, using, update_fields)
        if options.key_is_generated:
            forget_shard_choice([self])

    def delete(
        self, using: str | None = None, keep_parents: bool = False
    ) -> tuple[int, dict[str, int]]:
        refuse_other_key(self)
        refuse_rewritten_keys(self.__class__)
        options = self._shard_options()

        def write() -> tuple[int, dict[str, int]]:
            alias = self._write_alias(options, using)
            with writing(self):
                return super(ShardedModel, self).delete(using=alias, keep_parents=keep_parents)

        return repeated(options.group, write, nothing_written=lambda counts: not counts[0])

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

    def _refuse_relations_to_other_shards(
        self, options: ShardOptions, using: str, update_fields: Any
    ) -> None:
        # Check the relations before each save. Django asks the router about a relation only when a
        # row is assigned, and the shard key may have been set after that.
        refuse_related_of_other_key(self, update_fields)
        related: dict[str, Any] = self._state.fields_cache
        for name, other in related.items():
            alias = other._state.db if isinstance(other, models.Model) else None
            if alias in (None, using, options.group) or other._state.adding:
                continue
            other_options = options_of(other)
            if (
                other_options is not None
                and other_options.group == options.group
                and current_alias(other_options, other) != using
            ):
                raise CrossShardRelation(
                    f"{describe(self)} cannot be saved on {using!r}: its {name!r} is"
                    f" {describe(other)}, which is on {alias!r}. Rows of one group can only be"
                    " related on one shard."
                )

    def _refuse_near_on_other_shard(self, options: ShardOptions, using: str) -> None:
        # near=row puts a new row without a shard key on the shard of ``row``. But a new row with an
        # explicit key belongs on the shard of this key. Refuse the row if the two shards differ.
        near: Any = getattr(self._state, "near", None)
        alias = colocated_alias(options, near) if near is not None else None
        if alias is not None and alias != using:
            raise CrossShardRelation(
                f"{describe(self)} cannot be saved on {using!r}: near={describe(near)} is on"
                f" {alias!r}. Leave out the {options.key.name if options.key else None!r}, or near=."
            )

    def _refuse_other_shard(self, alias: str) -> None:
        """Raise an error if the shard key of this instance does not belong on the shard ``alias``.

        :raises ShardKeyChanged: the row is stored already, and its key belongs on another shard.
        :raises CrossShardRelation: for a new row whose key, near= or relation is on another shard.
        """
        options = self._shard_options()
        key = options.key
        kept: KeptShard | None = None
        if key is not None:
            if alias == self._state.db and key.attname not in self.__dict__:
                # The shard key was never loaded, so it is unchanged and belongs on this shard.
                return
            kept = self._state.__dict__.get("kept_shard")
            value = self.__dict__.get(key.attname)
            if kept is not None and kept.is_accepted(alias, value):
                return
            if kept is not None and type(value) is int and not options.key_has_pre_save:
                # A shortcut for integer keys, the commonest keys. It finds the same shard as the
                # code below, in half of the time.
                found = kept.find(options.group, key.get_prep_value(value), runtime.locate)
                if found is not None and found.alias == alias:
                    kept.accept(alias, value)
                    return
        home = runtime.topology().resolve(alias)
        if home is None and database_settings.template_group(alias) == options.group:
            return
        shard = row_placement.locate(options, self)
        if options.awaits_key(self):
            self._refuse_wrong_shard_of_new_id(alias, shard or home)
            return
        if shard is None and self._state.adding:
            shard = row_placement.place(options, self)
        if shard is not None and shard.alias == alias:
            if kept is not None and key is not None and not options.key_has_pre_save:
                kept.accept(alias, self.__dict__.get(key.attname))
            return
        name, key = options.key.name if options.key is not None else None, options.key_of(self)
        where = f"shard {shard.alias!r}" if shard is not None else "no shard yet"
        if not self._state.adding:
            raise ShardKeyChanged(
                f"{describe(self)} was read from {self._state.db!r} and cannot be written on {alias!r}: its shard"
                f" key {name}={key!r} is on {where}. The key of a row never changes by save(): leave out"
                " using= if it is given, or create the row under the new key and delete this one."
            )
        raise CrossShardRelation(
            f"{describe(self)} cannot be saved on {alias!r}: its shard key {name}={key!r} is on {where}."
            " Relate it only to rows with the same shard key, leave out using= if it is given, and set"
            " the key before save(), not in a receiver of pre_save."
        )

    def _refuse_wrong_shard_of_new_id(self, alias: str, required: Shard | None) -> None:
        # The shard key is generated for whichever shard stores the row. So the key fits any shard,
        # and only near= or a related row can require a certain shard.
        if required is None or required.group != self._shard_options().group:
            raise CrossShardRelation(
                f"{describe(self)} cannot be saved on {alias!r}, which is no shard of group"
                f" {self._shard_options().group!r}. Leave out using=."
            )
        if required.alias != alias:
            raise CrossShardRelation(
                f"{describe(self)} cannot be saved on {alias!r}: near= or a row that it refers to is"
                f" on {required.alias!r}. Leave out using=, or near=."
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
