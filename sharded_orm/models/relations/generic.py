"""Generic relations of sharded models, such as ``note.content_object`` and ``photo.notes``.

A note is *about* the row to which its generic foreign key refers. If both rows are in one group,
they are on one shard, as with a foreign key. If the row that the note is about is outside of the
group, the relation can be followed only if the stored values determine the shard. Otherwise an
error is raised.

The package's app imports this module only if ``django.contrib.contenttypes`` is installed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from django.apps import apps
from django.contrib.contenttypes.fields import (
    GenericForeignKey,
    GenericRelation,
    ReverseGenericManyToOneDescriptor,
)
from django.core.exceptions import ObjectDoesNotExist
from django.db import DEFAULT_DB_ALIAS, router
from django.db.models import Model, QuerySet
from django.db.models.signals import class_prepared
from django.utils.functional import cached_property

from sharded_orm import compat
from sharded_orm.exceptions import CrossShardRelation, DeletionRefused
from sharded_orm.models.querysets.prefetch_refusals import refuse_sets
from sharded_orm.models.querysets.prefetches import alias_of, is_one_of_several
from sharded_orm.models.querysets.sharded import ShardedQuerySet
from sharded_orm.models.relations.content_types import install_manager
from sharded_orm.models.relations.descriptors import make_related_manager, refuse_equal_values
from sharded_orm.models.relations.managers import NullableBeside, RelatedRows
from sharded_orm.models.relations.model_class import installers_of_relations
from sharded_orm.models.relations.outside_managers import NullableFromOutside
from sharded_orm.models.sharding.bound_key import EXEMPT
from sharded_orm.models.sharding.bound_query import BoundKeyQuery
from sharded_orm.models.sharding.bound_rows import refuse_other_key
from sharded_orm.models.sharding.counted_ids import is_unique_over_shards
from sharded_orm.models.sharding.instance_shard import on_shard_of
from sharded_orm.models.sharding.key_errors import describe, key_of_row_changed
from sharded_orm.models.sharding.options import group_of, required_options
from sharded_orm.models.sharding.row_placement import colocated_alias
from sharded_orm.models.sharding.same_key import key_for_related, refuse_two_keys


class ShardedGenericForeignKey(GenericForeignKey):
    """A generic foreign key that looks up the row to which it refers in the right database.

    If both rows are of one group, this is the shard of the row that has the foreign key. Otherwise
    the referenced row is in the global database, or on the shard that its id determines.
    """

    #: ``Colocation`` refuses a subquery that may read rows of another shard. Because of this
    #: attribute, it accepts a subquery along this field. A row and the row to which it refers are
    #: on one shard if they are of one group.
    stays_on_shard = True

    def check_references(self, alias: str, rows: Sequence[Any]) -> None:
        """Raise :exc:`CrossShardRelation` if a new row refers to a row of a different shard or key.

        The row to which a new row refers must be on the same shard, under the same shard key. No
        constraint of the database ensures this.

        If an instance was assigned to the new row, the keys were compared then. If only an id was
        set, a query looks for the referenced row. There is one query for each content type and
        shard key.

        :param alias: the alias of the shard on which the new rows are stored.
        :param rows: the new rows.
        """
        pks_by_model: dict[tuple[Any, tuple[Any, ...]], set[Any]] = defaultdict(set)
        for row in rows:
            model = self.content_model(row)
            _, pk = self.values(row)
            if model is None or pk is None or group_of(model) != group_of(self.model):
                continue
            about = self.get_cached_value(row, default=None)
            if about is None or not self.refers_to(row, about):
                key = tuple(key_for_related(model, self, row).items())
                pks_by_model[model, key].add(model._meta.pk.to_python(pk))
        for (model, key), pks in pks_by_model.items():
            stored = model._base_manager.using(alias).filter(pk__in=pks, **dict(key))
            absent = pks.difference(stored.values_list("pk", flat=True))
            if absent:
                raise CrossShardRelation(
                    f"A new {self.model.__name__} on {alias!r} is about {model.__name__} with the primary"
                    f" key {min(absent, key=repr)!r} ({self.name!r}), which is not there with the same shard key."
                    f" Give both the same shard key, and assign the instance to {self.name!r}, also if its"
                    " row was deleted."
                )

    def values(self, instance: Any) -> tuple[Any, Any]:
        """Return the id of the content type and the id of the row to which ``instance`` refers."""
        attname = self.model._meta.get_field(self.ct_field).attname
        return getattr(instance, attname, None), getattr(instance, self.fk_field)

    def content_model(self, instance: Any) -> Any:
        type_id, _ = self.values(instance)
        if type_id is None:
            return None
        return self.get_content_type(id=type_id, using=instance._state.db).model_class()

    def concerns_shards(self, content_models: Iterable[Any]) -> bool:
        return any(group_of(model) is not None for model in (self.model, *content_models))

    def alias_beside(self, model: Any, instance: Any) -> str | None:
        """Return the alias of the shard that has ``instance`` and its related rows of ``model``.

        Return None if the two models are not of one group.
        """
        group = group_of(self.model)
        return alias_of(instance) if group is not None and group_of(model) == group else None

    def refers_to(self, instance: Any, row: Any) -> bool:
        type_id, pk = self.values(instance)
        return bool(
            self.get_content_type(obj=row).pk == type_id and row._meta.pk.to_python(pk) == row.pk
        )

    def rows_of(self, model: Any, instance: Any) -> Any:
        """Return a queryset of ``model`` that finds the row to which ``instance`` refers.

        :raises BoundKeyMismatch: ``instance`` does not have the bound key, which a ``with bound()``
            block or a request has set.
        """
        refuse_other_key(instance)
        rows = model._base_manager.db_manager(hints={"instance": instance}).all()
        if type(rows) is QuerySet and group_of(model) not in (None, group_of(self.model)):
            rows = ShardedQuerySet(model)
        if isinstance(rows.query, BoundKeyQuery):
            # Find the row even if its key is not the bound key (set by bound()). If the query were
            # filtered by the bound key, the row would not be found, and the reference would seem to
            # be None.
            rows.query.bound_key = EXEMPT
        return compat.copy_fetch_mode(rows, instance)


class ShardedGenericDescriptor(compat.generic_foreign_key_descriptor()):  # type: ignore[misc]  # the base class is typed as Any
    """The descriptor of a generic foreign key, such as ``note.content_object``."""

    #: A :class:`ShardedGenericForeignKey`. The annotation is Any, because a type checker would give
    #: a field in a class body the type of the field's values.
    field: Any
    #: ``split_lookups()`` splits most prefetches by shard. This attribute tells it not to split a
    #: prefetch along this field: get_prefetch_querysets() needs the instances of all shards
    #: together.
    leads_anywhere = True

    def __get__(self, instance: Any, cls: Any = None) -> Any:
        # Overrides GenericForeignKeyDescriptor.__get__(), which looks for the referenced row in the
        # database of ``instance``. Look on the shard of the referenced row instead.
        model = None if instance is None else self.field.content_model(instance)
        if model is None or not self.field.concerns_shards([model]):
            return super().__get__(instance, cls)
        if self.field.is_cached(instance):
            row = self.field.get_cached_value(instance)
            if row is None or self.field.refers_to(instance, row):
                return row
        compat.fetch(self, instance)
        return self.field.get_cached_value(instance)

    def fetch_one(self, instance: Any) -> None:
        # Overrides GenericForeignKeyDescriptor.fetch_one() (Django 6.1), which queries the database
        # of ``instance``. Query the shard of the referenced row instead.
        model = self.field.content_model(instance)
        if model is None or not self.field.concerns_shards([model]):
            super().fetch_one(instance)
        else:
            self.field.set_cached_value(instance, self._find(instance, model))

    def __set__(self, instance: Any, value: Any) -> None:
        if value is not None:
            refuse_two_keys(self.field, instance, value)
            # This call raises an error if the two rows are on different shards.
            router.allow_relation(value, instance)
        super().__set__(instance, value)

    def get_prefetch_querysets(self, instances: Any, querysets: Any = None) -> Any:
        # Overrides GenericForeignKeyDescriptor.get_prefetch_querysets(), which sends one query for
        # each content type. If the referenced rows are in the same group as the instances, each of
        # them is on the shard of its instance. So send one query for each content type and shard.
        model_by_type: dict[Any, Any] = {}
        instance_by_place: dict[tuple[Any, str | None], Any] = {}
        pks_by_place: dict[tuple[Any, str | None], set[Any]] = defaultdict(set)
        for instance in instances:
            type_id, pk = self.field.values(instance)
            if type_id is None or pk is None:
                continue
            model = model_by_type.setdefault(type_id, self.field.content_model(instance))
            place = type_id, self.field.alias_beside(model, instance)
            instance_by_place.setdefault(place, instance)
            pks_by_place[place].add(pk)
        if not self.field.concerns_shards(model_by_type.values()):
            return super().get_prefetch_querysets(instances, querysets)
        querysets_by_type = self._querysets_by_type(querysets or ())
        rows: list[Any] = []
        places_of_type = Counter(type_id for type_id, _ in pks_by_place)
        for place, pks in pks_by_place.items():
            type_id, alias = place
            queryset = querysets_by_type.get(type_id)
            if queryset is None:
                queryset = self.field.rows_of(model_by_type[type_id], instance_by_place[place])
            elif alias is not None:
                instance = instance_by_place[place]
                queryset = queryset.filter(
                    on_shard_of(required_options(queryset.model), [instance])
                )
            if places_of_type[type_id] > 1 or is_one_of_several():
                group = group_of(queryset.model) if places_of_type[type_id] > 1 else None
                refuse_sets(queryset.query, group)
            rows.extend(compat.copy_fetch_mode(queryset.filter(pk__in=pks), instances[0]))

        def row_key(row: Any) -> tuple[Any, ...]:
            return row.__class__, row.pk, self.field.alias_beside(row.__class__, row)

        def instance_key(instance: Any) -> tuple[Any, ...] | None:
            type_id, pk = self.field.values(instance)
            if type_id is None:
                return None
            model = model_by_type.get(type_id)
            if model is None:
                # No row was read for the instance: either the model of the content type does not
                # exist any more, or no instance with this content type has an id. Return None,
                # which matches no row.
                return None
            return (
                model,
                model._meta.pk.get_prep_value(pk),
                self.field.alias_beside(model, instance),
            )

        refuse_equal_values(rows, row_key)
        return rows, row_key, instance_key, True, self.field.name, False

    def _find(self, instance: Any, model: Any) -> Any:
        _, pk = self.field.values(instance)
        if pk is None:
            return None
        try:
            return self.field.rows_of(model, instance).get(pk=pk)
        except ObjectDoesNotExist:
            return None

    def _querysets_by_type(self, querysets: Iterable[Any]) -> dict[Any, Any]:
        by_type: dict[Any, Any] = {}
        for queryset in querysets:
            type_id = self.field.get_content_type(model=queryset.query.model).pk
            if type_id in by_type:
                raise ValueError("Only one queryset is allowed for each content type.")
            by_type[type_id] = queryset
        return by_type


def generic_foreign_key(model: Any, ct_field: str, fk_field: str) -> GenericForeignKey | None:
    """Return the generic foreign key of ``model`` with the fields ``ct_field`` and ``fk_field``."""
    names = ct_field, fk_field
    for field in model._meta.private_fields:
        if isinstance(field, GenericForeignKey) and (field.ct_field, field.fk_field) == names:
            return field
    return None


class ShardedGenericRelation(GenericRelation):
    """A generic relation whose joins find rows on the same shard.

    If the row that has this relation is deleted, its related rows of the same group are deleted,
    too. Related rows of another group prevent the deletion.
    """

    #: ``Colocation`` refuses a join that may read rows of another shard. Because of this attribute,
    #: it accepts a join along this relation: two related rows are on one shard if they are of one
    #: group.
    stays_on_shard = True

    def bulk_related_objects(self, objs: Any, using: str = DEFAULT_DB_ALIAS) -> Any:
        # Overrides GenericRelation.bulk_related_objects(), which Django calls before it deletes
        # ``objs``. Django then deletes the returned rows, too, in the database of ``objs``. Related
        # rows of another group are in other databases, where Django does not delete them. So if
        # there are any, refuse the deletion.
        model: Any = self.remote_field.model
        group = group_of(model)
        if group == group_of(self.model):
            return super().bulk_related_objects(objs, using)
        rows = ShardedQuerySet(model).scatter() if group else model._base_manager.all()
        rows = rows.filter(
            **{
                f"{self.content_type_field_name}__pk": self.get_content_type().pk,
                f"{self.object_id_field_name}__in": [obj.pk for obj in objs],
            }
        )
        protected = list(rows)
        if not protected:
            return []
        where = f"on shards of group {group!r}" if group else "in the global database"
        scatter = ".scatter()" if group else ""
        raise DeletionRefused(
            f"{' and '.join(map(describe, objs[:3]))} cannot be deleted with the rows of"
            f" {model.__name__} about it ({self.name!r}), which are {where}: one statement cannot reach"
            f" both. Delete them first, with {model.__name__}.objects{scatter}.filter("
            f"{self.content_type_field_name}=…, {self.object_id_field_name}=…).delete().",
            protected,
        )


class ShardedReverseGenericDescriptor(ReverseGenericManyToOneDescriptor):
    """The descriptor of a generic relation, such as ``photo.notes``."""

    @cached_property
    def related_manager_cls(self) -> Any:
        manager = super().related_manager_cls
        rel: Any = self.rel
        group = group_of(rel.model)
        if group is None:
            return manager  # Global rows need no mixin: Django's manager finds them through the router.
        mixin = GenericBeside if group == group_of(rel.related_model) else GenericFromOutside
        return make_related_manager(manager, rel, (mixin,), reverse=False)


class GenericRows(RelatedRows):
    """The base class of the mixins for Django's related managers of generic relations."""

    content_type: Any
    content_type_field_name: str
    object_id_field_name: str
    pk_val: Any
    core_filters: dict[str, Any]

    def _apply_rel_filters(self, queryset: Any) -> Any:
        # Overrides _apply_rel_filters() of Django's manager, which always calls using() with an
        # alias from the router. If a queryset has an alias, it is not checked whether its
        # conditions determine another shard. So call using() only if the caller has chosen the
        # alias.
        queryset._add_hints(instance=self.instance)
        if self._db:
            queryset = queryset.using(self._db)
        return compat.copy_fetch_mode(queryset, self.instance).filter(**self.core_filters)

    def _related(self, values: dict[str, Any]) -> dict[str, Any]:
        relating = {
            self.content_type_field_name: self.content_type,
            self.object_id_field_name: self.pk_val,
        }
        return {**values, **relating}

    def _refuse_key_change(self, objs: Iterable[Any]) -> None:
        """Raise :exc:`ShardKeyChanged` if relating ``objs`` would change their shard key.

        For example, the shard key of a note is the field that contains the id of the photo that the
        note is about. Then ``photo.notes.add(note)`` would change the key of the note.
        """
        key = self._options.key
        if key is None or key.name not in (relating := self._related({})):
            return
        value = relating[key.name]
        value = value.pk if isinstance(value, Model) else key.to_python(value)
        for obj in objs:
            if not isinstance(obj, self.model) or obj._state.adding:
                continue
            own_value = getattr(obj, key.attname)
            if own_value != value:
                raise key_of_row_changed(obj, key.name, own_value, value)


class GenericBeside(GenericRows, NullableBeside):
    """The manager of ``photo.notes`` for notes that are on the shard of the photo."""

    def _apply_rel_filters(self, queryset: Any) -> Any:
        return super()._apply_rel_filters(self._on_shard(queryset, self.instance))

    def get_prefetch_querysets(self, instances: Sequence[Any], querysets: Any = None) -> Any:
        # The descriptor calls this method once for each shard. So all ``instances`` are on one
        # shard.
        rows = querysets or [super(self._django, self).get_queryset()]  # type: ignore[misc]  # the model's own manager has this method
        rows = [self._on_shard(queryset, instances[0]) for queryset in rows]
        return super().get_prefetch_querysets(instances, rows)  # type: ignore[misc]  # Django's manager class has this method

    def _on_shard(self, queryset: Any, instance: Any) -> Any:
        # Django compares only the primary key of ``instance``. On another shard, a different row
        # may have the same primary key. So add a condition that determines the shard.
        alias = colocated_alias(self._options, instance)
        if alias is None:
            return queryset
        unique = is_unique_over_shards(instance._meta.pk)
        return queryset.filter(on_shard_of(self._options, [instance], ids_are_unique=unique))

    def create(self, **kwargs: Any) -> Any:
        # Overrides create() of Django's manager, which sets only the id of the instance on the new
        # row. Set the instance itself, so that no query is needed to find it.
        names = self.content_type_field_name, self.object_id_field_name
        if (field := generic_foreign_key(self.model, *names)) is not None:
            kwargs[field.name] = self.instance
        return super().create(**kwargs)

    create.alters_data = True  # type: ignore[attr-defined]  # Django's method has this attribute, too

    def add(self, *objs: Any, bulk: bool = True) -> None:
        # Overrides add() of Django's manager, whose UPDATE could change the shard key of the rows.
        # Refuse this before the UPDATE.
        self._refuse_key_change(objs)
        super().add(*objs, bulk=bulk)

    add.alters_data = True  # type: ignore[attr-defined]  # Django's method has this attribute, too

    def set(self, objs: Iterable[Any], *, bulk: bool = True, clear: bool = False) -> None:
        # Overrides set() of Django's manager, to refuse rows whose shard key would change, before a
        # transaction begins.
        objs = tuple(objs)
        self._refuse_key_change(objs)
        super().set(objs, bulk=bulk, clear=clear)

    set.alters_data = True  # type: ignore[attr-defined]  # Django's method has this attribute, too


class GenericFromOutside(GenericRows, NullableFromOutside):
    """The manager of ``person.notes`` if the person is global or of another group than the notes.

    Each note is on the shard of its own shard key. ``remove()`` deletes the notes, as Django's
    method does.
    """

    def add(self, *objs: Any, bulk: bool = True) -> None:
        self._refuse_key_change(objs)
        if bulk:
            self._pks_by_alias(objs)  # Refuse rows that are not stored, as Django does.
        super().add(*objs, bulk=bulk)

    add.alters_data = True  # type: ignore[attr-defined]  # Django's method has this attribute, too

    def set(self, objs: Iterable[Any], *, bulk: bool = True, clear: bool = False) -> None:
        raise self._unbounded("set()")

    set.alters_data = True  # type: ignore[attr-defined]  # Django's method has this attribute, too

    def remove(self, *objs: Any, bulk: bool = True) -> None:
        by_alias: dict[str, set[Any]] = defaultdict(set)
        for obj in objs:
            refuse_other_key(obj)
            pk = obj.pk
            by_alias[self._alias_of(obj)].add(pk)
        self._begin_change()
        with self._atomic(several_statements=len(by_alias) > 1 or not bulk):
            for alias, pks in by_alias.items():
                rows = self.using(alias).filter(pk__in=pks)  # type: ignore[attr-defined]  # Django's manager class has this method
                if bulk:
                    rows.delete()
                    continue
                for row in rows:
                    row.delete()

    remove.alters_data = True  # type: ignore[attr-defined]  # Django's method has this attribute, too

    def _check_fk_val(self) -> None:
        pass  # Do nothing, as Django does: a generic relation has no foreign key to check.

    def _relation_and_change(self) -> tuple[str, str]:
        rel: Any = self._rel
        return rel.field.name, "delete()"


def install() -> None:
    """Replace Django's classes for generic relations on all models by the classes of this module.

    Plain models get them, too, because a plain model can have a generic relation to a sharded
    model. If neither side of a relation is on shards, the new classes behave like Django's.
    """
    install_manager()
    for model in apps.get_models(include_auto_created=True):
        _install_on(model)
    class_prepared.connect(_install_on, dispatch_uid="sharded_orm.generic")
    if _install_on not in installers_of_relations:
        installers_of_relations.append(_install_on)


def _install_on(sender: Any, **kwargs: Any) -> None:
    fields: list[Any] = sender._meta.private_fields
    for field in fields:
        # Change the class of the existing field object, because other objects refer to it already.
        # Leave a field alone if its class is a subclass of Django's class.
        if type(field) is GenericForeignKey:
            field.__class__ = ShardedGenericForeignKey
            setattr(sender, field.name, ShardedGenericDescriptor(field))
        elif type(field) is GenericRelation:
            field.__class__ = ShardedGenericRelation
            rel: Any = field.remote_field
            if type(sender.__dict__.get(field.name)) is ReverseGenericManyToOneDescriptor:
                setattr(sender, field.name, ShardedReverseGenericDescriptor(rel))
