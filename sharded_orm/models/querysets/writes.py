"""The writing methods of sharded querysets: each row is written on the shard of its key."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from django.db.models import Model, QuerySet
from django.db.models.constants import LOOKUP_SEP

from sharded_orm import compat
from sharded_orm.exceptions import CrossShardRelation
from sharded_orm.models.moves.repetition import follow_shard, part_of_write, repeated
from sharded_orm.models.querysets import original_methods as original
from sharded_orm.models.querysets.bulk_writes import (
    BulkWritingQuerySet,
    refuse_rows_of_other_shards,
)
from sharded_orm.models.querysets.cut_reads import refuse_cut_deletion, refuse_cut_update
from sharded_orm.models.querysets.deletion_checks import may_be_refused, refuse_deletion
from sharded_orm.models.querysets.route import colocation_on, names_shards, plain_key
from sharded_orm.models.sharding import row_placement
from sharded_orm.models.sharding.key_errors import describe, shard_key_required
from sharded_orm.models.sharding.options import options_of, required_options
from sharded_orm.models.sharding.rewritten_keys import refuse_rewritten_keys
from sharded_orm.models.sharding.same_key import (
    cross_key_relation,
    joined_instances,
    key_names,
    known_key,
    refuse_two_keys,
    refuse_values_of_other_key,
    relates_one_key,
)
from sharded_orm.models.sharding.statements import check_found_or_created, check_values
from sharded_orm.models.sharding.type_variables import M
from sharded_orm.scatter.refusals import check_values_of_time, check_written


class WritingQuerySet(BulkWritingQuerySet[M]):
    """A mixin with the writing methods of a sharded queryset."""

    # Type checkers need this declaration. Without it, the plugin of django-stubs gives as_manager()
    # a different type in each of the mixins of which a queryset class consists.
    if TYPE_CHECKING:

        @classmethod
        def as_manager(cls) -> Any: ...

    def create(self, **kwargs: Any) -> M:
        if not self._is_pinned():
            # The key of the new row determines its shard, and not the filters of this queryset. For
            # example, ``filter(user_id=1).create(user_id=2)`` stores the row on the shard of the
            # key 2.
            create: Any = super().create
            is_django = getattr(create, "__func__", None) is original.CREATE
            if not is_django or QuerySet.create is not original.CREATE:
                # A package has put a class of its own behind ours, as django-modeltranslation does,
                # or has replaced Django's method. With the alias of the group, save() chooses the
                # shard.
                new: M = self._run_on(self._options.group, create, **kwargs)
                return new
            self._for_write = True
            obj: M = self.model(**kwargs)
            obj.save(force_insert=True, using=self._db)
            compat.set_fetch_mode([obj], self, is_set=False)
            return obj
        return super().create(**kwargs)

    def get_or_create(self, defaults: Any = None, **kwargs: Any) -> tuple[M, bool]:
        self._refuse_new_row_of_two_keys({**kwargs, **(defaults or {})})

        def write() -> tuple[M, bool]:
            values = dict(kwargs)
            return self._on_shard_of_near(values)._found_or_created(
                values,
                None,
                defaults,
                # super() has arguments because the method is called on ``rows`` and not on ``self``.
                lambda rows: super(WritingQuerySet, rows).get_or_create(defaults, **values),  # noqa: UP008
            )

        return repeated(
            self._options.group,
            write,
            nothing_written=lambda result: not result[1],
            joins=self._is_pinned(),
        )

    def update_or_create(
        self, defaults: Any = None, create_defaults: Any = None, **kwargs: Any
    ) -> tuple[M, bool]:
        self._refuse_key(defaults or (), "update_or_create()", kwargs)
        new_row = defaults if create_defaults is None else create_defaults
        for values in (defaults, new_row):
            self._refuse_new_row_of_two_keys({**kwargs, **(values or {})})

        def write() -> tuple[M, bool]:
            values = dict(kwargs)
            return self._on_shard_of_near(values)._found_or_created(
                values,
                defaults,
                new_row,
                # super() has arguments because the method is called on ``rows`` and not on ``self``.
                lambda rows: super(WritingQuerySet, rows).update_or_create(  # noqa: UP008
                    defaults, create_defaults, **values
                ),
            )

        return repeated(
            self._options.group,
            write,
            nothing_written=lambda result: not result[1] and not defaults,
            joins=self._is_pinned(),
        )

    def _refuse_new_row_of_two_keys(self, values: dict[str, Any]) -> None:
        # Refuse ``get_or_create(user_id=1, album=album)`` if the album has the key 2. save() would
        # refuse it later, by CrossKeyRelation, but only after a query has looked for the row.
        options = self._options
        for name in key_names(options).intersection(values):
            key = known_key(options, self.model(**{name: values[name]}))
            if key is not None:
                refuse_values_of_other_key(options, key, values)

    def _on_shard_of_near(self, values: dict[str, Any]) -> Self:
        """Return this queryset, limited to the shard of the row ``values["near"]``.

        The argument ``near`` means: store the new row on the shard of that row. It is removed from
        ``values``. Return the queryset unchanged if ``values`` has no ``near``, or if the model
        does not generate its shard key.
        """
        options = self._options
        if not options.key_is_generated or (near := values.pop("near", None)) is None:
            return self
        alias = row_placement.place(options, self.model(near=near)).alias
        if self._is_pinned() and self._db != alias:
            raise CrossShardRelation(
                f"near={describe(near)} is on {alias!r}, and the row is to be found or created on"
                f" {self._db!r}. Leave out using(), or near=."
            )
        return self.using(alias)

    def _found_or_created(
        self,
        values: dict[str, Any],
        changed: dict[str, Any] | None,
        new: dict[str, Any] | None,
        run: Callable[[Self], tuple[M, bool]],
    ) -> tuple[M, bool]:
        """Call ``run`` with a copy of this queryset, on the shard of the row to find or create.

        :param values: the values by which the row is looked up. A new row gets them, too.
        :param changed: new values of an existing row.
        :param new: more values of a new row.
        """
        on_shard = self._on_shard_of_lookup(values, new)
        on_shard._check_found_or_created(changed, new)
        try:
            return run(on_shard)
        except CrossShardRelation:
            # ``run`` found no row, because another transaction has deleted it since it was found on
            # this shard. Then ``run`` tried to create the row on this shard. This was refused,
            # because ``new`` contains a key of another shard. So look up the shard once more.
            again = self._on_shard_of_lookup(values, new)
            if again._db == on_shard._db:
                raise
            again._check_found_or_created(changed, new)
            return run(again)

    def _check_found_or_created(
        self, changed: dict[str, Any] | None, new: dict[str, Any] | None
    ) -> None:
        # Refuse expressions that read other shards. save() would refuse them later, but only after
        # a query has looked for the row.
        colocation = colocation_on(self._options, str(self._db))
        check_found_or_created(colocation, self.model, changed, new)

    def _on_shard_of_lookup(self, values: dict[str, Any], new: dict[str, Any] | None) -> Self:
        """Return this queryset limited to the shard of the row that is to be found or created.

        :param values: the keyword arguments of ``get_or_create()`` or ``update_or_create()``.
            Without ``using()``, they must determine one shard, for example by the shard key or by
            an id that contains the shard.
        :param new: more values of a row to be created. If only ``new`` contains the shard key, this
            key determines the shard, provided that no stored row matches ``values``.
        """
        alias = str(self._db) if self._is_pinned() else self._alias_of_lookup(values, new)
        # Check the instances among ``values`` even if using() chooses the shard, because a new row
        # would refer to these instances.
        refuse_rows_of_other_shards(self._options, values.values(), alias)
        # Pass ordered=False, because the row is then read with get(), which sends no ORDER BY.
        self.filter(**values)._check_colocation_on(alias, ordered=False)
        return self.using(alias)

    def _alias_of_lookup(self, values: dict[str, Any], new: dict[str, Any] | None) -> str:
        options = self._options
        for name in key_names(options).intersection(values):
            probe = self.model(**{name: values[name]})
            return row_placement.place(options, probe).alias
        matching = self._chain()
        conditions = {k: v for k, v in values.items() if LOOKUP_SEP not in k}
        matching = matching.filter(**conditions) if conditions else matching
        route = matching._route()
        key = {name: new[name] for name in key_names(options).intersection(new)} if new else {}
        if (
            key
            and len(route.shards) < 2
            and not any(map(callable, key.values()))
            and not names_shards(options, matching.query)
            and not (route.shards and matching.exists())
        ):
            # ``values`` contain no key, but determine at most one shard, and this shard has no such
            # row. So create the row on the shard of the key in ``new``.
            return row_placement.place(options, self.model(**key)).alias
        if len(route.shards) != 1:
            raise shard_key_required(options, "the row to find or create is on no one shard")
        return route.aliases[0]

    def update(self, **kwargs: Any) -> int:
        self._refuse_key(kwargs, "update()")
        if self.query.is_sliced or self.query.combinator:
            return super().update(**kwargs)  # Django refuses to update a slice or a union().
        self._refuse_instances_of_other_key(kwargs)
        return repeated(
            self._options.group,
            lambda: self._update_rows(kwargs),
            nothing_written=lambda updated: not updated,
            joins=self._is_pinned(),
        )

    def _update_rows(self, kwargs: dict[str, Any]) -> int:
        destination = self._destination()
        aliases = (
            [destination]
            if isinstance(destination, str)
            else [target.shard.alias for target in destination]
        )
        for alias in aliases:
            refuse_rows_of_other_shards(self._options, kwargs.values(), alias)
        if not self._is_pinned_by_using():
            check_values(self._colocation(destination), self.query, kwargs.values())
        if isinstance(destination, str):
            return int(self._run_on(destination, super().update, **kwargs))
        if len(destination) > 1:
            check_written(self.query)
            check_values_of_time(self.query, kwargs.values())
            refuse_cut_update(self.query, kwargs, destination)
        self._result_cache = None
        updated = 0
        for number, target in enumerate(destination):
            with part_of_write(number):
                update = partial(super(WritingQuerySet, self._for_target(target)).update, **kwargs)
                updated += follow_shard(self._options.group, update)
        return updated

    def _refuse_instances_of_other_key(self, values: dict[str, Any]) -> None:
        """Raise :exc:`CrossKeyRelation` if a row would refer to an instance of another shard key.

        For example, ``update(album=album)`` is refused if one of the rows does not have the album's
        shard key. If a condition of this queryset contains the shard key, compare this key with the
        album's. Otherwise look for a row with another key, by one query for each instance.

        :param values: the new values of the rows, by the names of the fields.
        """
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
            # Read only the keys, and not instances, because the caller may have called values().
            of_other_key = self.exclude(**{attname: related_key}).order_by(attname)
            key = of_other_key.values_list(attname, flat=True).first()
            if key is not None:
                refuse_values_of_other_key(options, options.key.get_prep_value(key), {name: other})

    def _refuse_ends_of_two_keys(self, values: dict[str, Any]) -> None:
        # Refuse an update such as update(tag=tag) on an automatic many-to-many table if the tag
        # does not have the shard key of the other related row. Both related rows need the same key.
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
        """Delete the rows on each shard, in one transaction per shard.

        If the rows are on several shards, they are checked before any row is deleted. An error is
        raised if ``PROTECT`` or ``RESTRICT`` forbids the deletion of a row on any shard, or if
        ``SET()`` would give an instance of another shard key to a row.

        On each shard, the check sends the reads of Django's ``delete()`` once more, and calls the
        same functions. It is left out if nothing can forbid the deletion. This is so if no foreign
        key has ``PROTECT``, ``RESTRICT``, a function of the project, or ``SET()`` of a function or
        an instance, and if there is no generic relation to rows of another group.

        :raises ShardKeyChanged: ``on_delete`` of a foreign key that is a shard key would give it
            another value.
        :raises ScatterNotSupported: the rows are on several shards and have to be read before, and
            a server has a ``sql_select_limit``, which would cut them.
        """
        if self._is_deletion_refused():
            return super().delete()
        refuse_rewritten_keys(self.model)
        return repeated(
            self._options.group,
            self._delete_rows,
            nothing_written=lambda counts: not counts[0],
            joins=self._is_pinned(),
        )

    def _is_deletion_refused(self) -> bool:
        """Return whether Django's ``delete()`` refuses this queryset because of its form.

        Django refuses to delete a slice, ``union()`` and the like, ``values()``, and ``distinct()``
        with fields.
        """
        query = self.query
        is_of_other_rows = query.is_sliced or query.combinator or query.distinct_fields
        return bool(is_of_other_rows) or self._fields is not None

    def _delete_rows(self) -> tuple[int, dict[str, int]]:
        targets = self._targets(ordered=False)
        if targets is None:
            return self._delete_on_named_shard()
        parts = [self._for_target(target) for target in targets]
        if len(parts) > 1:
            check_written(self.query)
            refuse_cut_deletion(self.model, targets)
        if len(parts) > 1 and may_be_refused(self.model):
            refuse_deletion(self._options.group, parts)
        total, per_model = 0, dict[str, int]()
        for part, rows in enumerate(parts):
            with part_of_write(part):
                delete = super(WritingQuerySet, rows).delete
                deleted, counts = follow_shard(self._options.group, delete)
            total += deleted
            for label, number in counts.items():
                per_model[label] = per_model.get(label, 0) + number
        self._result_cache = None
        return total, per_model

    def _delete_on_named_shard(self) -> tuple[int, dict[str, int]]:
        """Delete the rows of a queryset with ``using()``."""
        return super().delete()

    delete.alters_data = True  # type: ignore[attr-defined]  # Django's method has this attribute, too
    delete.queryset_only = True  # type: ignore[attr-defined]  # Django's method has this attribute, too
