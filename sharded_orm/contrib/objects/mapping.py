"""The base classes of mappings: :class:`Mapping` and :class:`MirrorMapping`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from django.apps import apps
from django.core.exceptions import ValidationError
from django.db import models
from django.utils.translation import gettext_lazy as _

from sharded_orm.contrib.objects.exceptions import InvalidObjectType
from sharded_orm.contrib.objects.mapping_manager import (
    MappingManager,
    check_entry,
    clean_with_ids,
    entry_id,
    id_of,
    sides_changed,
)
from sharded_orm.contrib.objects.options import read_meta, refuse_concrete_base
from sharded_orm.models.base import ShardedModel
from sharded_orm.models.relations.model_class import ShardedModelBase


@dataclass(frozen=True, eq=False)
class MappingSides:
    """The two classes that a mapping relates. For each object of ``near``, the mapping has a list
    of objects of ``far``.

    For example, a mapping from boards to their pins has ``near=Board`` and ``far=Pin``. Its rows,
    the entries, are on the shards of the boards.

    :param app_label: the app of the mapping, for a class that is named without an app.
    :param near, far: classes of objects, or their labels.
    :param near_column, far_column: the columns with the ids of the two objects, such as
        ``source_id`` and ``target_id``.
    """

    app_label: str
    near: Any
    far: Any
    near_column: str
    far_column: str

    @cached_property
    def near_class(self) -> Any:
        return self._resolved(self.near)

    @cached_property
    def far_class(self) -> Any:
        return self._resolved(self.far)

    def _resolved(self, side: Any) -> Any:
        if not isinstance(side, str):
            return side
        return apps.get_model(side if "." in side else f"{self.app_label}.{side}")


class MappingBase(ShardedModelBase):
    """The metaclass of mappings. Makes ``ShardMeta`` from the two related classes and ``class
    MappingMeta``.
    """

    def __new__(
        mcs, name: str, bases: tuple[type, ...], attrs: dict[str, Any], **kwargs: Any
    ) -> Any:
        meta = attrs.get("Meta")
        if not getattr(meta, "abstract", False) and not getattr(meta, "proxy", False):
            refuse_concrete_base(name, bases)
            base: Any = next((each for each in bases if isinstance(each, MappingBase)), None)
            attrs["ShardMeta"] = type("ShardMeta", (), base._shard_meta(name, attrs))
        if meta is not None and not getattr(meta, "proxy", False):
            attrs["Meta"] = _with_paging_index(meta, bases)
        cls: Any = super().__new__(mcs, name, bases, attrs, **kwargs)
        if not cls._meta.abstract:
            cls._sides = cls._make_sides()
            _leave_plural(cls._meta)
        return cls


def _leave_plural(options: Any) -> None:
    """Let a name such as "board pins" be its own plural. Django would add another s.

    The plural of ``class Meta`` has priority. Migrations do not have this plural, as they do not
    have Django's default.
    """
    name = options.verbose_name
    if (
        "verbose_name_plural" not in options.original_attrs
        and isinstance(name, str)
        and name.endswith("s")
    ):
        options.verbose_name_plural = name


def _with_paging_index(meta: Any, bases: tuple[type, ...]) -> Any:
    """Return the mapping's ``class Meta``, with the index that reads of pages use.

    The index is added if it is missing. For example, it is missing if the project's ``class Meta``
    does not derive from that of the base class.
    """
    paging = next((base._paging for base in bases if hasattr(base, "_paging")), None)
    indexes = tuple(getattr(meta, "indexes", ()))
    if paging is None or any(index.fields == paging for index in indexes):
        return meta
    return type("Meta", (meta,), {"indexes": (*indexes, models.Index(fields=paging))})


class MappingEntry(ShardedModel, metaclass=MappingBase):
    """The common base of :class:`Mapping` and :class:`MirrorMapping`."""

    _sides: ClassVar[MappingSides]

    id: models.UUIDField[Any, Any] = models.UUIDField(primary_key=True, editable=False)
    source_id: models.BigIntegerField[Any, Any] = models.BigIntegerField()
    target_id: models.BigIntegerField[Any, Any] = models.BigIntegerField()
    sequence: models.BigIntegerField[Any, Any] = models.BigIntegerField()

    objects = MappingManager()

    class Meta:
        abstract = True

    def __str__(self) -> str:
        return f"{self.source_id} → {self.target_id}"

    @classmethod
    def _mapping_meta(cls, name: str, attrs: dict[str, Any], side: Any) -> dict[str, Any]:
        """Return the options ``cache`` and ``group`` of the mapping class ``name``.

        :param side: the class of objects on whose shards the entries are, or its label.
        """
        meta = attrs.get("MappingMeta", getattr(cls, "MappingMeta", None))
        values = read_meta(f"{name}.MappingMeta", meta, ("cache", "group"), ())
        group = values.get("group") if isinstance(side, str) else side._object.group
        if group is None or values.get("group", group) != group:
            raise InvalidObjectType(
                f"{name}.MappingMeta.group must be the group of {side!r}, on whose shards the entries are."
            )
        return {"group": group, "cache": values.get("cache", False)}


class Mapping(MappingEntry):
    """A table that records which target objects belong to a source object, in order (Pinterest,
    P7).

    ::

        class BoardPins(Mapping):
            source, target = Board, Pin

        BoardPins.objects.add(board, pin)
        page = BoardPins.objects.page(board, size=50)

    Each row, an entry, relates one source to one target. It is on the shard of the source. A class
    that is declared later is named by a text, such as ``target = "pins.Pin"``. ``MappingMeta`` may
    set ``cache = True``. It must set ``group`` if ``source`` is a text.
    """

    source: ClassVar[Any]
    target: ClassVar[Any]

    _paging: ClassVar[list[str]] = ["source_id", "sequence", "target_id"]

    class Meta:
        abstract = True
        indexes = (models.Index(fields=["source_id", "sequence", "target_id"]),)

    @classmethod
    def _shard_meta(cls, name: str, attrs: dict[str, Any]) -> dict[str, Any]:
        for side in ("source", "target"):
            if not _is_object_class(attrs.get(side, getattr(cls, side, None))):
                raise InvalidObjectType(
                    f"{name}.{side} must be a class of objects that is not abstract, or its label."
                )
        source = attrs.get("source", getattr(cls, "source", None))
        return {"shard_key": "source_id", **cls._mapping_meta(name, attrs, source)}

    @classmethod
    def _make_sides(cls) -> MappingSides:
        return MappingSides(cls._meta.app_label, cls.source, cls.target, "source_id", "target_id")

    def clean_fields(self, exclude: Any = None) -> None:
        """Raise ``ValidationError`` also for ids of other types, so that forms show the error."""
        clean_with_ids(super().clean_fields, self, self._classes_by_column(), exclude)

    def clean(self) -> None:
        """Raise ``ValidationError`` if a form would change the sides of a stored entry, or add an
        entry for a pair that has one.
        """
        super().clean()
        try:
            pk = entry_id(*(id_of(cls, getattr(self, c)) for c, cls in self._classes_by_column()))
        except ValueError:
            return  # clean_fields() has said so.
        if self._state.adding:
            if type(self).objects.contains(self.source_id, self.target_id):
                raise ValidationError(_("This pair is there already."), code="unique_together")
        elif pk != self.id:
            raise ValidationError(
                _("The source and the target never change. Delete this, and add another one."),
                code="sides_changed",
            )

    def _classes_by_column(self) -> tuple[tuple[str, Any], ...]:
        sides = self._sides
        return (sides.near_column, sides.near_class), (sides.far_column, sides.far_class)

    def save(self, *args: Any, **kwargs: Any) -> None:
        check_entry(self)
        pk = entry_id(self.source_id, self.target_id)
        if not self._state.adding and pk != self.id:
            raise sides_changed(type(self))
        self.id = pk
        super().save(*args, **kwargs)


class MirrorMapping(MappingEntry):
    """The other direction of a mapping: copies of its entries, on the shards of its targets
    (Pinterest, P7).

    ::

        class PinBoards(MirrorMapping):
            mapping = BoardPins

        PinBoards.objects.page(pin)  # the boards of a pin

    It is read-only. It repeats each write of the mapping, as :doc:`mirrors
    </howto/store-data-twice>` do, and needs the app ``sharded_orm.contrib.mirrors``.
    ``MappingMeta`` may set ``cache = True``, and must set ``group`` if ``target`` of the mapping is
    a text.
    """

    mapping: ClassVar[Any]

    _paging: ClassVar[list[str]] = ["target_id", "sequence", "source_id"]

    class Meta:
        abstract = True
        indexes = (models.Index(fields=["target_id", "sequence", "source_id"]),)

    @classmethod
    def _shard_meta(cls, name: str, attrs: dict[str, Any]) -> dict[str, Any]:
        mapping = attrs.get("mapping")
        if not (isinstance(mapping, type) and issubclass(mapping, Mapping)):
            raise InvalidObjectType(f"{name}.mapping must be a class that derives from Mapping.")
        values = cls._mapping_meta(name, attrs, mapping.target)
        return {"shard_key": "target_id", "mirror_of": mapping, **values}

    @classmethod
    def _make_sides(cls) -> MappingSides:
        sides = cls.mapping._sides
        return MappingSides(sides.app_label, sides.far, sides.near, "target_id", "source_id")


def _is_object_class(side: Any) -> bool:
    return isinstance(side, str) or (isinstance(side, type) and hasattr(side, "_object"))
