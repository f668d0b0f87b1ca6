"""The writing methods of sharded querysets: each row is written on the shard of its key."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Self

from django.db.models import Model
from django.db.models.constants import LOOKUP_SEP

from sharded_orm import compat, runtime
from sharded_orm.exceptions import CrossShardRelation, ShardKeyChanged
from sharded_orm.models.fields.generated_id import (
    EmbeddedShardMixin,
    forget_shard_choice,
    generated_id_fields,
)
from sharded_orm.models.moves.repetition import part_of_write, repeated
from sharded_orm.models.querysets.base import RoutedQuerySet
from sharded_orm.models.querysets.route import colocation_on, plain_key
from sharded_orm.models.sharding.current_shard import current_alias
from sharded_orm.models.sharding.options import (
    ShardOptions,
    colocated_alias,
    describe,
    options_of,
    required_options,
    shard_key_required,
)
from sharded_orm.models.sharding.references import check_references
from sharded_orm.models.sharding.same_key import (
    cross_key_relation,
    joined_instances,
    key_names,
    known_key,
    refuse_related_of_other_key,
    refuse_two_keys,
    refuse_values_of_other_key,
    relates_one_key,
)
from sharded_orm.models.sharding.statements import check_insert, check_update, check_values
from sharded_orm.models.sharding.type_variables import M


class WritingQuerySet(RoutedQuerySet[M]):
    """A mixin with the writing methods of a sharded queryset."""

    if TYPE_CHECKING:  # The plugin of django-stubs gives each mixin another one.

        @classmethod
        def as_manager(cls) -> Any: ...

    def create(self, **kwargs: Any) -> M:
        if not self._is_pinned():
            # The new row's key decides the row's shard, even if the filters of this queryset name
            # another shard.
            self._for_write = True
            obj: M = self.model(**kwargs)
            obj.save(force_insert=True, using=self._db)
            compat.set_fetch_mode([obj], self)
            return obj
        return super().create(**kwargs)

    def get_or_create(self, defaults: Any = None, **kwargs: Any) -> tuple[M, bool]:
        self._refuse_new_row_of_two_keys({**kwargs, **(defaults or {})})
        on_shard = self._on_shard_of_near(kwargs)._on_shard_of_lookup(kwargs)
        return super(WritingQuerySet, on_shard).get_or_create(defaults, **kwargs)

    def update_or_create(
        self, defaults: Any = None, create_defaults: Any = None, **kwargs: Any
    ) -> tuple[M, bool]:
        self._refuse_key(defaults or (), "update_or_create()", kwargs)
        new_row = defaults if create_defaults is None else create_defaults
        for values in (defaults, new_row):
            self._refuse_new_row_of_two_keys({**kwargs, **(values or {})})
        on_shard = self._on_shard_of_near(kwargs)._on_shard_of_lookup(kwargs)
        return super(WritingQuerySet, on_shard).update_or_create(
            defaults, create_defaults, **kwargs
        )

    def _refuse_new_row_of_two_keys(self, values: dict[str, Any]) -> None:
        # Raise CrossKeyRelation before the first query: save() would raise it after the row was
        # looked up.
        options = self._options
        for name in key_names(options).intersection(values):
            key = known_key(options, self.model(**{name: values[name]}))
            if key is not None:
                refuse_values_of_other_key(options, key, values)

    def _on_shard_of_near(self, values: dict[str, Any]) -> Self:
        """Return this queryset limited to the shard of ``values["near"]``; remove ``near`` from
        ``values``.

        ``near`` is a row next to which the new row is to be stored. Return the queryset unchanged
        if ``values`` has no ``near``, or if the model does not generate its shard key.
        """
        options = self._options
        if not options.key_is_generated or (near := values.pop("near", None)) is None:
            return self
        alias = options.place(self.model(near=near)).alias
        if self._is_pinned() and self._db != alias:
            raise CrossShardRelation(
                f"near={describe(near)} is on {alias!r}, and the row is to be found or created on"
                f" {self._db!r}. Leave out using(), or near=."
            )
        return self.using(alias)

    def _on_shard_of_lookup(self, values: dict[str, Any]) -> Self:
        """Return this queryset limited to the shard of the row that is to be found or created.

        ``values`` are the keyword arguments of ``get_or_create()`` or ``update_or_create()``. If
        ``using()`` was not called, they must contain the shard key, or name one shard by other
        conditions. A key in the argument ``defaults`` is not enough: a row on another shard could
        match ``values`` and would be missed.
        """
        alias = str(self._db) if self._is_pinned() else self._alias_of_lookup(values)
        # Check the instances among ``values`` even if using() names the shard: a new row would
        # refer to these instances.
        _refuse_rows_of_other_shards(self._options, values.values(), alias)
        # Pass ordered=False, because get(), which will read the row, sends no ORDER BY.
        self.filter(**values)._check_colocation_on(alias, ordered=False)
        return self.using(alias)

    def _alias_of_lookup(self, values: dict[str, Any]) -> str:
        options = self._options
        for name in key_names(options).intersection(values):
            probe = self.model(**{name: values[name]})
            return options.place(probe).alias
        matching = self._chain()
        conditions = {k: v for k, v in values.items() if LOOKUP_SEP not in k}
        matching = matching.filter(**conditions) if conditions else matching
        route = matching._route()
        if len(route.shards) != 1:
            raise shard_key_required(options, "the row to find or create is on no one shard")
        return route.aliases[0]

    def bulk_create(self, objs: Iterable[Any], *args: Any, **kwargs: Any) -> list[M]:
        """Insert rows with one INSERT per shard and batch.

        If ids come from a ticket server, one request fetches the ids of all rows. The insert is
        atomic on each shard, but not over several shards: if it fails on one shard, the rows that
        were already inserted on other shards stay.
        """
        objs = list(objs)
        names = ("batch_size", "ignore_conflicts", "update_conflicts", "update_fields")
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        self._refuse_key(arguments.get("update_fields") or (), "bulk_create(update_conflicts=True)")
        if self._is_pinned() or not objs:
            for obj in objs:
                obj._refuse_other_shard(self._db)
            _check_new_rows(self._options, str(self._db), objs)
            self._fill_ids(objs)
            return self._store(objs, *args, **kwargs)
        options = self._options
        self._for_write = True
        by_alias = _by_alias(options, objs)
        for alias, rows in by_alias.items():
            _check_new_rows(options, alias, rows)
        self._fill_ids(objs)
        for alias, rows in sorted(by_alias.items()):
            self.using(alias)._store(rows, *args, **kwargs)
        return objs

    def _store(self, objs: list[Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Insert ``objs`` on the one shard of this queryset, with Django's ``bulk_create()``.

        If the insert fails, remove the ids that it has set on ``objs``.
        """
        model: Any = self.model
        if self._options.key_is_generated:
            for obj in objs:
                obj._refuse_near_on_other_shard(self._options, self._db)
        generated = generated_id_fields(model)
        without_id = [
            (obj, field.attname)
            for field in generated
            for obj in objs
            if getattr(obj, field.attname) is None
        ]
        try:
            rows: list[Any] = super().bulk_create(objs, *args, **kwargs)
        except BaseException:
            # If one batch fails, the rows of the earlier batches are rolled back too. So remove the
            # new ids from all objects.
            for obj, attname in without_id:
                setattr(obj, attname, None)
            raise
        if generated:
            forget_shard_choice(objs)
        return rows

    def _insert(
        self,
        objs: Any,
        fields: Any,
        returning_fields: Any = None,
        raw: bool = False,
        using: str | None = None,
        **conflict: Any,
    ) -> Any:
        # This overrides QuerySet._insert(), through which Django stores every new row. Each field
        # that generates ids with a shard number has a method insert_rows(), which runs the insert
        # and checks the ids.
        def insert(returning: Any) -> Any:
            return super(WritingQuerySet, self)._insert(  # type: ignore[misc]  # not in the stubs
                objs, fields, returning, raw, using, **conflict
            )

        model: Any = self.model
        for field in generated_id_fields(model):
            insert = partial(
                field.insert_rows,
                objs,
                str(using),
                insert=insert,
                on_conflict=conflict.get("on_conflict"),
                unique_fields=conflict.get("unique_fields"),
            )
        return insert(returning_fields or ())

    def _fill_ids(self, objs: list[Any]) -> None:
        for field in self.model._meta.concrete_fields:
            fill = getattr(field, "fill_many", None)
            if fill is not None:
                fill(objs)

    def bulk_update(
        self, objs: Iterable[Any], fields: Iterable[str], batch_size: Any = None
    ) -> int:
        objs, fields = tuple(objs), tuple(fields)
        self._refuse_key(fields, "bulk_update()")
        if self._is_pinned():
            key = self._options.key
            for obj in objs:
                refuse_related_of_other_key(obj, fields)
                # Skip a row whose key is None. A deferred key, which is not loaded, does not count
                # as None.
                if key is not None and obj.__dict__.get(key.attname, obj) is not None:
                    obj._refuse_other_shard(str(self._db))
        if self._is_pinned() or not objs or not fields:
            return super().bulk_update(objs, fields, batch_size)
        # Check all rows before the first write. Django's own checks in bulk_update() run shard by
        # shard, so some of them would come after a write on another shard.
        if not all(obj._is_pk_set() for obj in objs):
            raise ValueError("All bulk_update() objects must have a primary key set.")
        columns = [self.model._meta.get_field(name) for name in fields]
        for obj in objs:
            obj._prepare_related_fields_for_save("bulk_update", columns)
        by_shard: dict[str, list[Any]] = {}
        for obj in objs:
            alias = current_alias(self._options, obj)
            if alias is None or obj._state.adding:
                shard = self._options.locate(obj)
                alias = shard.alias if shard is not None else None
            if alias is not None:
                obj._refuse_other_shard(alias)
                refuse_related_of_other_key(obj, fields)
                _refuse_rows_of_other_shards(self._options, obj._state.fields_cache.values(), alias)
                by_shard.setdefault(alias, []).append(obj)
        for alias, rows in by_shard.items():
            # Check which rows the filters of this queryset read, because the filters become part of
            # the UPDATE on each shard.
            self._check_colocation_on(alias, ordered=False)
            check_update(colocation_on(self._options, alias), rows, fields)
        return sum(
            super(WritingQuerySet, self.using(alias)).bulk_update(rows, fields, batch_size)
            for alias, rows in sorted(by_shard.items())
        )

    def update(self, **kwargs: Any) -> int:
        self._refuse_key(kwargs, "update()")
        if self.query.is_sliced or self.query.combinator:
            return super().update(**kwargs)  # Django raises an error for such a query.
        self._refuse_instances_of_other_key(kwargs)
        return repeated(self._options.group, lambda: self._update_rows(kwargs))

    def _update_rows(self, kwargs: dict[str, Any]) -> int:
        destination = self._destination()
        aliases = (
            [destination]
            if isinstance(destination, str)
            else [target.shard.alias for target in destination]
        )
        for alias in aliases:
            _refuse_rows_of_other_shards(self._options, kwargs.values(), alias)
        if not self._is_pinned_by_using():
            check_values(self._colocation(destination), self.query, kwargs.values())
        if isinstance(destination, str):
            return int(self._run_on(destination, super().update, **kwargs))
        self._result_cache = None
        updated = 0
        for number, target in enumerate(destination):
            with part_of_write(number):
                updated += super(WritingQuerySet, self._for_target(target)).update(**kwargs)
        return updated

    def _refuse_instances_of_other_key(self, values: dict[str, Any]) -> None:
        # Refuse update(album=album) if one of the rows has another shard key than the album. If the
        # conditions do not name the key, ask the database: one query for each such value.
        options = self._options
        if options.key is None:
            self._refuse_ends_of_two_keys(values)
            return
        joined = joined_instances(options, values)
        if not joined:
            return
        key = plain_key(options, self.query)
        if key is not None:
            refuse_values_of_other_key(options, options.key.get_prep_value(key), joined)
            return
        for name, other in joined.items():
            others = options_of(other)
            assert others is not None
            related_key = known_key(others, other, load=True)
            if related_key is None:
                continue
            attname = options.key.attname
            # Read keys and not rows, because the caller may have called values().
            of_other_key = self.exclude(**{attname: related_key}).order_by(attname)
            key = of_other_key.values_list(attname, flat=True).first()
            if key is not None:
                refuse_values_of_other_key(options, options.key.get_prep_value(key), {name: other})

    def _refuse_ends_of_two_keys(self, values: dict[str, Any]) -> None:
        # The same for an automatic many-to-many table, whose rows have the key of the two rows that
        # they relate.
        options = self._options
        instances = {name: value for name, value in values.items() if isinstance(value, Model)}
        if not instances or not relates_one_key(options):
            return
        if len(instances) == 2:
            refuse_two_keys(None, *instances.values(), load=True)
            return
        ((name, other),) = instances.items()
        related_key = known_key(required_options(other.__class__), other, load=True)
        for opposite in options.relations:
            if opposite.name == name or not {opposite.name, opposite.attname}.isdisjoint(values):
                continue
            key: Any = required_options(opposite.related_model).key
            path = f"{opposite.name}__{key.attname}"
            of_other_key = self.exclude(**{path: related_key}).order_by(path)
            first = of_other_key.values_list(path, flat=True).first()
            if first is not None:
                row = f"A row of {self.model.__name__}"
                raise cross_key_relation(row, first, describe(other), related_key, name)

    def delete(self) -> tuple[int, dict[str, int]]:
        if self.query.is_sliced or self.query.combinator:
            return super().delete()  # Django raises an error for such a query.
        return repeated(self._options.group, self._delete_rows)

    def _delete_rows(self) -> tuple[int, dict[str, int]]:
        targets = self._targets(ordered=False)
        if targets is None:
            return super().delete()
        total, per_model = 0, dict[str, int]()
        for part, target in enumerate(targets):
            with part_of_write(part):
                deleted, counts = super(WritingQuerySet, self._for_target(target)).delete()
            total += deleted
            for label, number in counts.items():
                per_model[label] = per_model.get(label, 0) + number
        self._result_cache = None
        return total, per_model

    delete.alters_data = True  # type: ignore[attr-defined]  # as Django marks it
    delete.queryset_only = True  # type: ignore[attr-defined]  # as Django marks it

    def _refuse_key(self, names: Iterable[str], method: str, lookup: Any = None) -> None:
        key = self._options.key
        if key is None:
            return
        fixed = {key.name: "the shard key", key.attname: "the shard key"}
        for field in self.model._meta.concrete_fields:
            if isinstance(field, EmbeddedShardMixin):
                fixed.setdefault(field.name, "an id that holds the shard")
        for name in names:
            if name in fixed:
                same = lookup is not None and name in lookup
                if same and isinstance(names, dict) and names[name] == lookup[name]:
                    continue
                raise ShardKeyChanged(
                    f"{method} cannot set {name!r} of {self.model.__name__}: it is {fixed[name]}, and"
                    " the rows would stay on the wrong shard. Create the row under the new key and"
                    " delete the old one."
                )


def _refuse_rows_of_other_shards(options: ShardOptions, values: Iterable[Any], alias: str) -> None:
    """Raise :exc:`CrossShardRelation` if one of ``values`` is an instance on another shard than
    ``alias``.

    ``values`` are the values of a row that is to be stored on ``alias``. Through such a value, the
    row would refer to an instance on another shard.
    """
    for value in values:
        value_alias = colocated_alias(options, value) if isinstance(value, Model) else None
        if value_alias is not None and value_alias != alias:
            raise CrossShardRelation(
                f"{describe(value)} is on shard {value_alias!r}, and rows of {options.model.__name__} on"
                f" {alias!r} would refer to it. Rows of one group can only be related on one shard:"
                " give both the same shard key."
            )


def _check_new_rows(options: ShardOptions, alias: str, rows: list[Any]) -> None:
    """Raise an error unless the new ``rows`` can be stored on the shard ``alias``.

    For this, the shard must have all rows to which the new rows refer, and all rows that
    expressions in the new rows read. And the ``pre_save()`` of the key's field must not change the
    key.
    """
    for row in rows:
        options.refuse_key_changed_on_insert(row)
        refuse_related_of_other_key(row)
        _refuse_rows_of_other_shards(options, row._state.fields_cache.values(), alias)
    check_insert(colocation_on(options, alias), rows)
    check_references(alias, rows)


def _by_alias(options: ShardOptions, objs: list[Any]) -> dict[str, list[Any]]:
    """Return the new rows ``objs`` as one list per shard, keyed by the shard's alias.

    Each list keeps the order of ``objs``. A key that has no shard yet first gets one, which is
    recorded.
    """
    for obj in objs:
        # Copy the primary keys of related rows into ``obj``: a related row may have been saved
        # after it was assigned to ``obj``.
        obj._prepare_related_fields_for_save(operation_name="bulk_create")
    by_alias: dict[str, list[Any]] = {}
    if options.key is None:
        for obj in objs:
            shard = options.place(obj)
            obj._refuse_other_shard(shard.alias)
            by_alias.setdefault(shard.alias, []).append(obj)
        return by_alias
    read = options.key_of if options.key_has_pre_save else attrgetter(options.key.attname)
    awaiting = (
        {id(obj) for obj in objs if options.awaits_key(obj)} if options.key_is_generated else ()
    )
    # Pair each key with its type: 1, 1.0 and True are equal in Python, but may be different keys
    # when they are converted to text.
    values = [(type(value), value) for value in map(read, objs)]
    # Convert each distinct key only once. There are many rows and few keys, and converting a key
    # costs more than a look-up in a dict.
    samples = {
        value: obj for value, obj in zip(values, objs, strict=True) if id(obj) not in awaiting
    }
    keys = {value: options.key_of(obj) for value, obj in samples.items()}
    numbers = options.place_keys(dict.fromkeys(keys.values()))
    group = runtime.group(options.group)
    shards = {number: runtime.shard_in(group, number) for number in set(numbers.values())}
    for value, obj in zip(values, objs, strict=True):
        shard = options.place(obj) if id(obj) in awaiting else shards[numbers[keys[value]]]
        by_alias.setdefault(shard.alias, []).append(obj)
    return by_alias
