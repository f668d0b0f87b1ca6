"""The methods of sharded querysets that write many rows at once, one transaction per shard."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from django.db import transaction
from django.db.models import Model

from sharded_orm import runtime
from sharded_orm.exceptions import CrossShardRelation, KeyMoved, ShardKeyChanged, ShardMoved
from sharded_orm.models.fields.generated_id import (
    EmbeddedShardMixin,
    forget_shard_choice,
    generated_id_fields,
    insert_with_ids,
)
from sharded_orm.models.moves.repetition import refuse_former_route, repeated
from sharded_orm.models.plans.inserts import insert_row
from sharded_orm.models.plans.switch import are_write_plans_on
from sharded_orm.models.querysets.base import RoutedQuerySet
from sharded_orm.models.querysets.route import colocation_on
from sharded_orm.models.querysets.value_checks import check_changed_values, check_new_values
from sharded_orm.models.sharding import row_placement
from sharded_orm.models.sharding.current_shard import current_alias
from sharded_orm.models.sharding.generic_keys import check_references
from sharded_orm.models.sharding.key_errors import describe
from sharded_orm.models.sharding.options import ShardOptions
from sharded_orm.models.sharding.row_placement import colocated_alias
from sharded_orm.models.sharding.same_key import refuse_related_of_other_key
from sharded_orm.models.sharding.shard_refusals import refuse_near_on_other_shard
from sharded_orm.models.sharding.statements import check_insert, check_update
from sharded_orm.models.sharding.type_variables import M
from sharded_orm.scatter.refusals import check_values_of_time, check_written


class BulkWritingQuerySet(RoutedQuerySet[M]):
    """A mixin with ``bulk_create()`` and ``bulk_update()`` of a sharded queryset."""

    # Type checkers need this declaration. Without it, the plugin of django-stubs gives as_manager()
    # a different type in each of the mixins of which a queryset class consists.
    if TYPE_CHECKING:

        @classmethod
        def as_manager(cls) -> Any: ...

    def bulk_create(self, objs: Iterable[Any], *args: Any, **kwargs: Any) -> list[M]:
        """Insert rows with one INSERT per shard and batch.

        If ids come from a ticket server, one request fetches the ids of all rows.

        The insert is atomic on each shard, but not over several shards. If it fails on one shard,
        the rows that were already inserted on other shards stay. So if there are several shards,
        all values are converted before the first insert, so that a value of a wrong type raises an
        error before any row is stored. The exception is values that ``pre_save()`` of a field
        computes. They are converted only when they are sent.
        """
        objs = list(objs)
        names = ("batch_size", "ignore_conflicts", "update_conflicts", "update_fields")
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        self._refuse_key(arguments.get("update_fields") or (), "bulk_create(update_conflicts=True)")
        if not objs:
            return self._store(objs, *args, **kwargs)
        pending = objs

        def write() -> None:
            # If a key moves, this function is called once more. It then looks up the shards of
            # those rows that are not stored yet.
            nonlocal pending
            for alias, rows in self._new_rows_by_alias(pending):
                self.using(alias)._store(rows, *args, **kwargs)
                done = set(map(id, rows))
                pending = [obj for obj in pending if id(obj) not in done]

        try:
            repeated(self._options.group, write, joins=self._is_pinned())
        except (KeyMoved, ShardMoved) as error:
            if len(pending) < len(objs):
                error.is_in_part = True
                error.add_note(
                    f"{len(objs) - len(pending)} of {len(objs)} rows were inserted on other shards:"
                    " those whose _state.adding is False. Pass the others again."
                )
            raise
        return objs

    def _new_rows_by_alias(self, objs: list[Any]) -> list[tuple[str, list[Any]]]:
        options = self._options
        if self._is_pinned():
            for obj in objs:
                obj._refuse_other_shard(self._db)
            by_alias = {str(self._db): objs}
        else:
            self._for_write = True
            by_alias = _by_alias(options, objs)
        for alias, rows in by_alias.items():
            _check_new_rows(options, alias, rows)
        check_new_values(self.model, by_alias)
        self._fill_ids(objs)
        return sorted(by_alias.items())

    def _store(self, objs: list[Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Insert ``objs`` on the one shard of this queryset, with Django's ``bulk_create()``.

        If the insert fails, remove the ids that it has set on ``objs``.
        """
        model: Any = self.model
        if self._options.key_is_generated:
            for obj in objs:
                refuse_near_on_other_shard(self._options, obj, str(self._db))
        generated = generated_id_fields(model)
        without_id = [
            (obj, field.attname)
            for field in generated
            for obj in objs
            if getattr(obj, field.attname) is None
        ]
        new = [obj for obj in objs if obj._state.adding]
        try:
            create = super().bulk_create
            # Django reads ``self.db`` once for each row. Inside _run_on(), this does not look up
            # the shard each time.
            rows: list[Any] = (
                self._run_on(str(self._db), create, objs, *args, **kwargs)
                if objs
                else create(objs, *args, **kwargs)
            )
        except BaseException:
            # If one batch fails, the rows of the earlier batches are rolled back too. So no object is
            # stored: remove the new ids from all objects, and mark the objects as new again.
            for obj, attname in without_id:
                setattr(obj, attname, None)
            for obj in new:
                obj._state.adding = True
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
        # Overrides QuerySet._insert(), through which Django stores every new row. A field that
        # generates ids with a shard number has a method insert_rows(), which runs the insert and
        # checks the ids. insert_with_ids() calls this method of each such field.
        def insert(returning: Any) -> Any:
            if len(objs) == 1 and not any(conflict.values()) and are_write_plans_on():
                return insert_row(self.model, objs[0], fields, returning, raw, str(using))
            return super(BulkWritingQuerySet, self)._insert(  # type: ignore[misc]  # missing in Django's type stubs
                objs, fields, returning, raw, using, **conflict
            )

        return insert_with_ids(
            self.model, objs, str(using), returning_fields or (), insert, **conflict
        )

    def _fill_ids(self, objs: list[Any]) -> None:
        for field in self.model._meta.concrete_fields:
            fill = getattr(field, "fill_many", None)
            if fill is not None:
                fill(objs)

    def bulk_update(
        self, objs: Iterable[Any], fields: Iterable[str], batch_size: Any = None
    ) -> int:
        """Update ``fields`` of stored rows, in one transaction per shard.

        If there are several shards, all values are converted before the first UPDATE, so that a
        value of a wrong type changes nothing.
        """
        objs, fields = tuple(objs), tuple(fields)
        self._refuse_key(fields, "bulk_update()")
        if self._is_pinned():
            key = self._options.key
            for obj in objs:
                refuse_related_of_other_key(obj, fields)
                # Skip a row whose key is None, because such a row has no shard. Do not skip a row
                # whose key is deferred.
                if key is not None and obj.__dict__.get(key.attname, obj) is not None:
                    obj._refuse_other_shard(str(self._db))
        if self._is_pinned() or not objs or not fields:
            return super().bulk_update(objs, fields, batch_size)
        # Check all rows before the first write. Django would check them shard by shard, and could
        # raise an error after it has already written to one shard.
        if not all(obj._is_pk_set() for obj in objs):
            raise ValueError("All bulk_update() objects must have a primary key set.")
        columns = [self.model._meta.get_field(name) for name in fields]
        for obj in objs:
            obj._prepare_related_fields_for_save("bulk_update", columns)
        pending, updated = objs, 0

        def write() -> None:
            nonlocal pending, updated
            for alias, rows in self._stored_rows_by_alias(pending, fields):
                with transaction.atomic(alias, savepoint=False):
                    number = super(BulkWritingQuerySet, self.using(alias)).bulk_update(
                        rows, fields, batch_size
                    )
                    # If a key has moved, the UPDATE may have missed rows. Then raise an error
                    # before the commit. So nothing is committed on this shard, and a second attempt
                    # updates no row twice.
                    refuse_former_route()
                updated += number
                done = set(map(id, rows))
                pending = tuple(obj for obj in pending if id(obj) not in done)

        try:
            repeated(self._options.group, write)
        except (KeyMoved, ShardMoved) as error:
            if updated:
                error.is_in_part = True
                error.add_note(f"{updated} rows were updated on other shards already.")
            raise
        return updated

    def _stored_rows_by_alias(
        self, objs: Iterable[Any], fields: Iterable[str]
    ) -> list[tuple[str, list[Any]]]:
        by_shard: dict[str, list[Any]] = {}
        for obj in objs:
            alias = current_alias(self._options, obj)
            if alias is None or obj._state.adding:
                shard = row_placement.locate(self._options, obj)
                alias = shard.alias if shard is not None else None
            if alias is not None:
                obj._refuse_other_shard(alias)
                refuse_related_of_other_key(obj, fields)
                refuse_rows_of_other_shards(self._options, obj._state.fields_cache.values(), alias)
                by_shard.setdefault(alias, []).append(obj)
        if self.query.where.contains_over_clause and not isinstance(
            self._destination(ordered=False), str
        ):
            check_written(self.query)
        columns = [self.model._meta.get_field(name) for name in fields]
        if len(by_shard) > 1:
            check_values_of_time(
                self.query,
                (obj.__dict__.get(column.attname) for obj in objs for column in columns),
            )
        for alias, rows in by_shard.items():
            # The UPDATE on the shard contains the filters of this queryset. Check that these
            # filters read no rows of other shards. On MariaDB and MySQL, it also contains the order.
            self._check_colocation_on(alias, ordered=bool(self.query.order_by))
            check_update(colocation_on(self._options, alias), rows, fields)
        check_changed_values(by_shard, columns)
        return sorted(by_shard.items())

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


def refuse_rows_of_other_shards(options: ShardOptions, values: Iterable[Any], alias: str) -> None:
    """Raise :exc:`CrossShardRelation` if a value is an instance on another shard than ``alias``.

    A row that is stored on ``alias`` must not refer to such an instance.

    :param values: values of the row; those that are no model instances are ignored.
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
    """Raise an error if the new ``rows`` cannot be stored on the shard ``alias``.

    The shard must have all rows to which the new rows refer, and all rows that expressions in the
    new rows read. The ``pre_save()`` of the shard key's field must not change the key.
    """
    for row in rows:
        options.refuse_key_changed_on_insert(row)
        if related := row._state.fields_cache:
            refuse_related_of_other_key(row)
            refuse_rows_of_other_shards(options, related.values(), alias)
    check_insert(colocation_on(options, alias), rows)
    check_references(alias, rows)


def _by_alias(options: ShardOptions, objs: list[Any]) -> dict[str, list[Any]]:
    """Return the new rows ``objs`` as one list per shard, keyed by the shard's alias.

    Each list keeps the order of ``objs``. If a key has no shard yet, a shard is assigned to the key
    and recorded in the directory, the table that stores the shard of each key.
    """
    meta = options.model._meta
    if any(field.is_relation for field in (*meta.concrete_fields, *meta.private_fields)):
        for obj in objs:
            # Copy the primary keys of related rows into ``obj``, because a related row may have
            # been saved after it was assigned to ``obj``.
            obj._prepare_related_fields_for_save(operation_name="bulk_create")
    by_alias: dict[str, list[Any]] = {}
    if options.key is None:
        for obj in objs:
            shard = row_placement.place(options, obj)
            obj._refuse_other_shard(shard.alias)
            by_alias.setdefault(shard.alias, []).append(obj)
        return by_alias
    read = options.key_of if options.key_has_pre_save else attrgetter(options.key.attname)
    awaiting = (
        {id(obj) for obj in objs if options.awaits_key(obj)} if options.key_is_generated else ()
    )
    # Use each key together with its type: 1, 1.0 and True are equal in Python, but may be different
    # keys when they are converted to text.
    values = [(type(value), value) for value in map(read, objs)]
    # Convert each distinct key only once. There are many rows and few keys, and converting a key
    # costs more than a look-up in a dict.
    samples = {
        value: obj for value, obj in zip(values, objs, strict=True) if id(obj) not in awaiting
    }
    keys = {value: options.key_of(obj) for value, obj in samples.items()}
    numbers = row_placement.place_keys(options, dict.fromkeys(keys.values()))
    group = runtime.group(options.group)
    aliases = {number: runtime.shard_in(group, number).alias for number in set(numbers.values())}
    for value, obj in zip(values, objs, strict=True):
        is_awaiting = id(obj) in awaiting
        alias = (
            row_placement.place(options, obj).alias
            if is_awaiting
            else aliases[numbers[keys[value]]]
        )
        by_alias.setdefault(alias, []).append(obj)
    return by_alias
