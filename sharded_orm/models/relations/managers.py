"""Mixins that make Django's related managers find the right shards.

A related manager of Django asks the router for one alias, and the router knows only the instance
that has the manager. If the related rows are on the shard of the instance, this alias is right; see
:class:`Beside` and :class:`ManyBeside`. If the instance is global or of another group, the alias is
wrong; see :class:`~sharded_orm.models.relations.outside_managers.FromOutside`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from django.db import router, transaction
from django.db.models import Model, Q
from django.db.models.base import ModelState
from django.db.models.utils import resolve_callables

from sharded_orm import compat
from sharded_orm.exceptions import CrossShardRelation, RoutingError
from sharded_orm.models.moves.confirmation import in_transaction
from sharded_orm.models.moves.repetition import repeated, write_in_part
from sharded_orm.models.sharding.bound_rows import refuse_other_key, related_rows_checked
from sharded_orm.models.sharding.counted_ids import is_unique_over_shards
from sharded_orm.models.sharding.current_shard import current_alias
from sharded_orm.models.sharding.instance_shard import on_shard_of
from sharded_orm.models.sharding.key_errors import describe
from sharded_orm.models.sharding.options import ShardOptions, options_of, shard_options
from sharded_orm.models.sharding.row_placement import colocated_alias
from sharded_orm.models.sharding.same_key import (
    key_for_related,
    key_names,
    refuse_related_of_other_key,
    refuse_two_keys,
    with_key,
)


class RelatedRows:
    """The base class of the mixins for related managers.

    It declares the attributes of Django's related managers that the mixins use.
    """

    instance: Any
    model: Any
    #: The foreign key. Managers of a many-to-many field or of a generic relation do not have this
    #: attribute.
    field: Any
    _db: str | None
    #: Django's relation object, such as a ManyToOneRel. It belongs to the model to which the field
    #: refers.
    _rel: Any
    #: The class of Django's related manager. In the method resolution order, it follows the mixins.
    _django: type[Any]

    @property
    def _options(self) -> ShardOptions:
        options = shard_options(self.model)
        assert options is not None
        return options

    def _repeated(self, change: Callable[[], Any]) -> Any:
        """Call ``change``. If a shard key moves to another shard meanwhile, call it again.

        A second call does no harm, because ``change`` only relates, unrelates or deletes rows. So
        two calls have the same result as one.
        """
        return repeated(self._options.group, change, nothing_written=lambda _: True)

    def _created(self, create: Callable[[], Any]) -> Any:
        """Call ``create``. If it fails because a shard key moves to another shard, call it again.

        :param create: stores a row. If it raises an error after it has stored the row, it must have
            called ``write_in_part()`` before. Then it is not called again.
        """
        return repeated(self._options.group, create)

    def _found_or_created(self, run: Callable[[], tuple[Any, bool]]) -> tuple[Any, bool]:
        """Call ``run``. If a shard key moves to another shard meanwhile, call it again.

        It is not called again if it has created a row.

        :param run: returns a row, and whether the row was created.
        """
        return repeated(self._options.group, run, nothing_written=lambda result: not result[1])

    def _values_with_key(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return ``values`` of a new related row, with the shard key of the instance added.

        The key is added only if the row must have the same key as the instance, and if ``values``
        contains no key.
        """
        key = key_for_related(self.model, self._rel.field, self.instance)
        return with_key(self.model, key, values)


def _refuse_unrelatable(field: Any, instance: Any, rows: Iterable[Any]) -> None:
    """Raise :exc:`CrossShardRelation` if one of ``rows`` cannot be related to ``instance``.

    A row cannot be related if its shard or its shard key differs from that of ``instance``. Without
    this check, a wrong row might be changed: a row on the shard of ``instance`` with the same id.

    :param field: the foreign key or many-to-many field of the relation.
    """
    for row in rows:
        if isinstance(row, Model):
            refuse_two_keys(field, row, instance, load=True)
            refuse_other_key(row)
            router.allow_relation(row, instance)


class Beside(RelatedRows):
    """The manager of ``album.photos``, whose related rows are on the shard of the album.

    It refuses rows of other shards. Django would find such a row by its primary key alone, and
    could change another row, which has the same primary key on the album's shard.
    """

    def add(self, *objs: Any, bulk: bool = True) -> None:
        # Overrides RelatedManager.add, to refuse rows of other shards before a transaction begins.
        _refuse_unrelatable(self._rel.field, self.instance, objs)
        add = super().add  # type: ignore[misc]  # Django's manager class has this method

        def change() -> None:
            for obj in objs:
                # If a row was read before its shard key moved, its alias is outdated, and Django
                # would refuse the row. So update the alias.
                if isinstance(obj, self.model) and not obj._state.adding:
                    obj._state.db = current_alias(self._options, obj)
            add(*objs, bulk=bulk)

        self._repeated(change)

    add.alters_data = True  # type: ignore[attr-defined]  # Django's method has this attribute, too

    def set(self, objs: Iterable[Any], *, bulk: bool = True, clear: bool = False) -> None:
        # Overrides RelatedManager.set (create_reverse_many_to_one_manager), to refuse rows of other
        # shards before anything is changed.
        objs = tuple(objs)
        _refuse_unrelatable(self._rel.field, self.instance, objs)
        set_rows = super().set  # type: ignore[misc]  # the base class is chosen at run time
        self._repeated(lambda: set_rows(objs, bulk=bulk, clear=clear))

    set.alters_data = True  # type: ignore[attr-defined]  # Django's method has this attribute, too

    def create(self, **kwargs: Any) -> Any:
        # Overrides RelatedManager.create(), to set the shard key of the instance on the new row.
        create = super().create  # type: ignore[misc]  # Django's manager class has this method
        values = self._values_with_key(kwargs)
        return self._created(lambda: create(**values))

    create.alters_data = True  # type: ignore[attr-defined]  # Django's method has this attribute, too

    def get_or_create(self, **kwargs: Any) -> Any:
        # Overrides RelatedManager.get_or_create(), to give a new row the shard key of the instance.
        get_or_create = super().get_or_create  # type: ignore[misc]  # Django's manager class has this method
        values = self._values_with_key(kwargs)
        return self._found_or_created(lambda: get_or_create(**values))

    get_or_create.alters_data = True  # type: ignore[attr-defined]  # Django's method has this attribute, too

    def update_or_create(self, **kwargs: Any) -> Any:
        # Overrides RelatedManager.update_or_create(), to give a new row the shard key of the
        # instance.
        update_or_create = super().update_or_create  # type: ignore[misc]  # Django's manager class has this method
        values = self._values_with_key(kwargs)
        return self._found_or_created(lambda: update_or_create(**values))

    update_or_create.alters_data = True  # type: ignore[attr-defined]  # Django's method has this attribute, too


class NullableBeside(Beside):
    """The manager of ``album.photos`` if the foreign key may be NULL.

    It also has ``remove()`` and ``clear()``.
    """

    def remove(self, *objs: Any, bulk: bool = True) -> None:
        # Overrides RelatedManager.remove, to refuse rows of other shards.
        _refuse_unrelatable(self._rel.field, self.instance, objs)
        remove = super().remove  # type: ignore[misc]  # Django's manager class has this method
        self._repeated(lambda: remove(*objs, bulk=bulk))

    remove.alters_data = True  # type: ignore[attr-defined]  # Django's method has this attribute, too

    def clear(self, *, bulk: bool = True) -> None:
        # Overrides RelatedManager.clear(). If the shard key moves to another shard during the call,
        # Django's method fails. Then call it once more, so that it finds the new shard.
        clear = super().clear  # type: ignore[misc]  # Django's manager class has this method
        self._repeated(lambda: clear(bulk=bulk))

    clear.alters_data = True  # type: ignore[attr-defined]  # Django's method has this attribute, too


class ManyBeside(RelatedRows):
    """The manager of ``photo.tags`` and of the other side, ``tag.photos``.

    The photo, its tags and the rows of the many-to-many table between them are on one shard.
    """

    through: Any
    target_field: Any
    target_field_name: str
    source_field: Any
    source_field_name: str

    def _apply_rel_filters(self, queryset: Any) -> Any:
        # Overrides ManyRelatedManager._apply_rel_filters(), which filters only by the instance's
        # primary key. On another shard, a different row may have the same primary key, so the
        # filter must also determine the shard. If related rows have the shard key of the instance,
        # _RelatedManager has filtered by this key already. Otherwise, add a condition that
        # determines the instance's shard. add_q() changes the queryset in place; _RelatedManager
        # has passed a copy.
        if key_for_related(self.model, self._rel.field, self.instance):
            return super()._apply_rel_filters(queryset)  # type: ignore[misc]  # Django's manager class has this method
        alias = colocated_alias(self._options, self.instance)
        if alias is not None:
            unique = is_unique_over_shards(self.source_field)
            on_shard = on_shard_of(self._options, [self.instance], ids_are_unique=unique)
            queryset.query.add_q(Q(on_shard))
        return super()._apply_rel_filters(queryset)  # type: ignore[misc]  # Django's manager class has this method

    def add(self, *objs: Any, through_defaults: Any = None) -> None:
        # Overrides ManyRelatedManager.add(), which inserts the rows of the many-to-many table by
        # INSERT IGNORE. If such a row referred to a row of another shard, MariaDB would skip it
        # without an error. So check first that the rows to be related are on this shard.
        self.check_targets(objs)
        # create() and get_or_create() call add() after they have stored the related row. If a key
        # moves now, they must not be called again, because they would store that row twice. So
        # record that a part of their write is stored. add() itself can be called again. In a
        # transaction, such as that of set(), nothing is called again anyway.
        if not in_transaction(self._options.group):
            write_in_part()
        add = super().add  # type: ignore[misc]  # Django's manager class has this method
        defaults = self._through_with_key(through_defaults, objs) if objs else through_defaults
        self._repeated(lambda: add(*objs, through_defaults=defaults))

    add.alters_data = True  # type: ignore[attr-defined]  # Django's method has this attribute, too

    def set(
        self, objs: Iterable[Any], *, clear: bool = False, through_defaults: Any = None
    ) -> None:
        # Overrides ManyRelatedManager.set(), which removes old rows before it checks the new ones.
        # Call set_base(), which checks the new rows first.
        self.set_base(objs, clear=clear, through_defaults=through_defaults)

    set.alters_data = True  # type: ignore[attr-defined]  # Django's method has this attribute, too

    def set_base(
        self,
        objs: Iterable[Any],
        *,
        clear: bool = False,
        through_defaults: Any = None,
        raw: bool = False,
    ) -> None:
        # Overrides ManyRelatedManager.set_base() (Django 6.1), which deserializers call. Django
        # removes old rows before it checks the new rows, so check the new rows first.
        objs = tuple(objs)
        self.check_targets(objs)
        if objs:
            related = None if clear else objs
            through_defaults = self._through_with_key(through_defaults, related)
        manager = super()
        self._repeated(
            lambda: compat.set_base(
                manager, objs, clear=clear, through_defaults=through_defaults, raw=raw
            )
        )

    set_base.alters_data = True  # type: ignore[attr-defined]  # Django's set() has this attribute, too

    def remove(self, *objs: Any) -> None:
        # Overrides ManyRelatedManager.remove(), which compares only primary keys. Rows of other
        # shards may have the same primary keys as rows of this shard, so refuse them.
        _refuse_unrelatable(self._rel.field, self.instance, objs)
        remove = super().remove  # type: ignore[misc]  # Django's manager class has this method
        self._repeated(lambda: remove(*objs))

    remove.alters_data = True  # type: ignore[attr-defined]  # Django's method has this attribute, too

    def clear(self) -> None:
        # Overrides ManyRelatedManager.clear(). If the shard key moves to another shard during the
        # call, Django's method fails. Then call it once more, so that it finds the new shard.
        clear = super().clear  # type: ignore[misc]  # Django's manager class has this method
        self._repeated(clear)

    clear.alters_data = True  # type: ignore[attr-defined]  # Django's method has this attribute, too

    def create(self, *, through_defaults: Any = None, **kwargs: Any) -> Any:
        # Overrides ManyRelatedManager.create(), to set the shard key of the instance on the related
        # row and on the row of an explicit many-to-many table.
        through_defaults = self._through_with_key(through_defaults)
        create = super().create  # type: ignore[misc]  # Django's manager class has this method
        values = self._values_with_key(kwargs)
        return self._created(
            lambda: self._written_whole(
                through_defaults, lambda: create(through_defaults=through_defaults, **values)
            )
        )

    create.alters_data = True  # type: ignore[attr-defined]  # Django's method has this attribute, too

    def get_or_create(self, *, through_defaults: Any = None, **kwargs: Any) -> Any:
        # Overrides ManyRelatedManager.get_or_create(), to set the shard key of the instance on new
        # rows.
        through_defaults = self._through_with_key(through_defaults)
        values = self._values_with_key(kwargs)
        get_or_create = super().get_or_create  # type: ignore[misc]  # Django's manager class has this method
        return self._found_or_created(
            lambda: self._written_whole(
                through_defaults, lambda: get_or_create(through_defaults=through_defaults, **values)
            )
        )

    get_or_create.alters_data = True  # type: ignore[attr-defined]  # Django's method has this attribute, too

    def update_or_create(self, *, through_defaults: Any = None, **kwargs: Any) -> Any:
        # Overrides ManyRelatedManager.update_or_create(), to set the shard key of the instance on
        # new rows.
        through_defaults = self._through_with_key(through_defaults)
        values = self._values_with_key(kwargs)
        update_or_create = super().update_or_create  # type: ignore[misc]  # Django's manager class has this method
        return self._found_or_created(
            lambda: self._written_whole(
                through_defaults,
                lambda: update_or_create(through_defaults=through_defaults, **values),
            )
        )

    update_or_create.alters_data = True  # type: ignore[attr-defined]  # Django's method has this attribute, too

    def _add_items(self, *args: Any, **kwargs: Any) -> None:
        # Overrides ManyRelatedManager._add_items(), which inserts the rows of the many-to-many
        # table. Skip the check of the keys of these rows, because check_targets() has already
        # compared the keys of the instances to be related.
        if len(args) > 2 and kwargs.get("through_defaults"):
            # Django would call the callables now, too.
            values = kwargs["through_defaults"]
            placing = dict(resolve_callables(self._placing_values(values)))
            source, target, *related = args
            self._check_through_values(placing, related, source, target)
            kwargs["through_defaults"] = {**values, **placing}
        with related_rows_checked():
            super()._add_items(*args, **kwargs)  # type: ignore[misc]  # Django's manager class has this method

    def _through_with_key(self, values: Any, related: Any = None) -> Any:
        """Return ``values`` of a new row of the many-to-many table, with the shard key added.

        :param values: the argument ``through_defaults``.
        :param related: as for :meth:`_check_through_values`.
        :raises CrossKeyRelation, CrossShardRelation, ShardKeyRequired: the row would have another
            shard key than the instance, or would refer to a row of another key. Callables among
            ``values`` are not checked, because Django calls them only if it adds a row;
            ``_add_items()`` checks them then.
        """
        key = key_for_related(self.through, self._rel.field, self.instance)
        with_its_key = with_key(self.through, key, values or {}) if key else values
        if values:
            # Check the values before anything is written. Django stores or deletes other rows
            # first: create() stores the related row, and set() deletes old rows.
            placing = self._placing_values(with_its_key)
            plain = {name: value for name, value in placing.items() if not callable(value)}
            self._check_through_values(plain, related)
        return with_its_key

    def _placing_values(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return those of ``values`` that are the shard key or relations of a row of the
        many-to-many table. Empty if the table has no key of its own.
        """
        options = shard_options(self.through)
        if options is None or options.key is None:
            return {}
        names = key_names(options)
        for field in self.through._meta.concrete_fields:
            if field.is_relation:
                names |= {field.name, field.attname}
        return {name: value for name, value in values.items() if name in names}

    def _check_through_values(
        self, placing: dict[str, Any], related: Any = None, source: str = "", target: str = ""
    ) -> None:
        """Raise an error if a row of the many-to-many table cannot have the values ``placing``.

        :param related: the rows to be related, instances or primary keys. If all of them are
            related already, no row gets the values, so there is no error. None if there will be a
            row in any case.
        :param source: the name of the foreign key to the instance, if ``related`` is given. Empty
            for :attr:`source_field`, and alike ``target``.
        """
        if not placing:
            return
        try:
            self._check_row_with(placing)
        except RoutingError:
            alias = router.db_for_write(self.through, instance=self.instance)
            if related is None or alias == self._options.group:
                raise
            source, target = source or self.source_field_name, target or self.target_field_name
            ids = self._get_target_ids(target, related)  # type: ignore[attr-defined]  # Django's manager class has this method
            if self._get_missing_target_ids(source, target, alias, ids):  # type: ignore[attr-defined]  # Django's manager class has this method
                raise

    def _check_row_with(self, placing: dict[str, Any]) -> None:
        options = shard_options(self.through)
        assert options is not None
        # Make the row without its constructor, which would send signals and evaluate the defaults
        # of all fields. Set the key first, so that the relations are compared with it.
        row = self.through.__new__(self.through)
        row._state = ModelState()
        row.__dict__.update(dict.fromkeys(f.attname for f in self.through._meta.concrete_fields))
        for name in sorted(placing, key=lambda name: name not in key_names(options)):
            setattr(row, name, placing[name])
        if placing.keys().isdisjoint((self.source_field.name, self.source_field.attname)):
            setattr(row, self.source_field.name, self.instance)
        refuse_related_of_other_key(row)
        alias = router.db_for_write(self.through, instance=self.instance)
        if alias != options.group and not key_names(options).isdisjoint(placing):
            row._refuse_other_shard(alias)

    def _written_whole(self, through_values: Any, write: Callable[[], Any]) -> Any:
        """Call ``write``, which stores a related row and then a row of the many-to-many table.

        If the second row is refused because of what callables among ``through_values`` return, the
        first is not stored either.
        """
        if not any(map(callable, self._placing_values(through_values or {}).values())):
            return write()
        alias = router.db_for_write(type(self.instance), instance=self.instance)
        if alias == self._options.group:
            return write()  # The instance is new, and has no shard yet.
        with transaction.atomic(using=alias):
            return write()

    def check_targets(self, objs: Any) -> None:
        """Check that ``objs``, instances or primary keys, can be related to the instance. One query
        if there are primary keys or instances that are not stored.

        :raises CrossShardRelation: one of them is on another shard.
        """
        # Check ``objs`` before Django opens its atomic block. An error inside this block would make
        # the caller's transaction unusable.
        _refuse_unrelatable(self._rel.field, self.instance, objs)
        self._get_target_ids(self.target_field_name, objs)  # type: ignore[attr-defined]  # Django's manager class has this method
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
        if alias == self._options.group:
            # The instance is new, and has no shard yet. So no related row is stored, and there is no
            # database to ask.
            self._refuse_missing_key()
            absent, place = values, "no shard yet, so beside it"
        else:
            key = key_for_related(self.model, self._rel.field, self.instance)
            rows = self.model._base_manager.using(alias).filter(**{f"{column}__in": values}, **key)
            absent = values.difference(rows.values_list(column, flat=True))
            place = f"shard {alias!r}, where"
        if absent:
            name = self.model._meta.object_name
            raise CrossShardRelation(
                f"{describe(self.instance)} is on {place} there is no {name} with"
                f" {column} in {sorted(absent, key=repr)!r}: rows of one group can only be related on one"
                " shard. Relate it to rows that are stored and have the same shard key."
            )

    def _refuse_missing_key(self) -> None:
        """Raise the error with which the new instance cannot be saved, if its shard key is missing."""
        options = options_of(self.instance)
        if options is not None and not options.awaits_key(self.instance):
            options.key_of(self.instance)
