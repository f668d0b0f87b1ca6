"""The object id of a sharded row: the text that names the row in URLs and in the admin's log.

Most primary keys do not show on which shard their row is. So an object id holds both the shard key
and the primary key. When a user opens a link, the row is looked up by both keys, on the shard to
which the shard key leads at that time. So a link stays valid when the shard key moves. A forged or
outdated link finds no row. A row is *misplaced* if its shard key leads to a different shard than
the one that the row is on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from django.db.models import Model

from sharded_orm import runtime
from sharded_orm.admin.exceptions import InvalidFocus, InvalidObjectID
from sharded_orm.admin.misplaced_rows import shard_numbers
from sharded_orm.admin.shard_scope import (
    locate,
    named_shard,
    read_key,
    refuse_key,
    stored_value,
)
from sharded_orm.exceptions import RoutingError
from sharded_orm.models.sharding import row_placement
from sharded_orm.models.sharding.options import ShardOptions, required_options
from sharded_orm.topology.model import Shard

#: ``SEPARATOR`` stands between the parts of an object id. ``MISPLACED`` begins the object id of a
#: misplaced row; the alias of the row's shard follows it.
SEPARATOR, MISPLACED = "~", "@"


@dataclass(frozen=True)
class Identity:
    """The parts of an object id, which names the row with the primary key ``pk`` on ``shard``.

    ``key`` is the row's shard key; None if the object id does not hold it. ``misplaced`` is true if
    the object id holds the alias of the shard instead, because the row's shard key leads to a
    different shard.
    """

    options: ShardOptions
    shard: Shard
    pk: Any
    key: Any = None
    misplaced: bool = False

    def among(self, rows: Any) -> Any:
        """Return the queryset ``rows`` narrowed to the row that this object id names, on that row's
        shard.

        The result is empty if the row does not exist.
        """
        conditions = {"pk": self.pk}
        if self.key is not None and self.options.key is not None:
            conditions[self.options.key.attname] = self.key
        return rows.using(self.shard.alias).filter(**conditions)


@dataclass(frozen=True)
class RowIdentity:
    """The results that :func:`identify` stores on a row: the object id, and whether the row is
    misplaced.

    The alias, the primary key and the shard key of the row are stored with the results. If one of
    these has changed on the row since then, the results are not used.
    """

    alias: str
    pk: Any
    key_name: str
    key: Any
    object_id: str
    misplaced: bool


def object_id(row: Model) -> str:
    """Return the object id of a stored row. In URLs it has to be quoted by Django's ``quote()``.

    - ``414~7``: shard key and primary key;
    - ``7``: the primary key alone, if it determines the shard;
    - ``@photos_00003~7``: the shard and the primary key of a misplaced row.

    Costs nothing after :func:`identify`. Otherwise, if this process does not remember the shard of
    the row's key, costs a query of the directory, the table that records the shard of each key.
    """
    identity = _kept_identity(row)
    if identity is not None:
        return identity.object_id
    options = required_options(type(row))
    if is_misplaced(row):
        return _object_id(row, alias=row._state.db)
    return _object_id(row, key=None if options.names_shard(row._meta.pk) else options.key_of(row))


def is_misplaced(row: Model) -> bool:
    """Whether a stored row is misplaced, that is, on another shard than its shard key says.

    ``save()`` and ``delete()`` refuse a misplaced row. Costs as much as :func:`object_id`.
    """
    identity = _kept_identity(row)
    if identity is not None:
        return identity.misplaced
    options = required_options(type(row))
    alias = row._state.db
    here = runtime.topology().resolve(alias) if alias is not None else None
    if here is None or here.group != options.group:
        return False
    try:
        return row_placement.locate(options, row) != here
    except RoutingError:
        return True


def identify(rows: Iterable[Model]) -> list[Model]:
    """Store the results of :func:`object_id` and :func:`is_misplaced` on each of ``rows``.

    Costs at most one query of the directory for each 500 different shard keys of a model. The
    directory is the table that records the shard of each key.

    :return: the misplaced rows: those whose shard key leads to a different shard.
    """
    rows_by_model: dict[type[Model], list[Model]] = {}
    for row in rows:
        rows_by_model.setdefault(type(row), []).append(row)
    misplaced: list[Model] = []
    for model, rows_of_model in rows_by_model.items():
        misplaced += _identify(required_options(model), rows_of_model)
    return misplaced


def _identify(options: ShardOptions, rows: Sequence[Model]) -> Iterator[Model]:
    key_name = options.key.attname if options.key is not None else ""
    keys = [options.key_of(row) for row in rows]
    numbers = shard_numbers(options.group, dict.fromkeys(keys))
    named_by_key = not options.names_shard(options.model._meta.pk)
    topology = runtime.topology()
    shards = {alias: topology.resolve(alias) for alias in {row._state.db or "" for row in rows}}
    for row, key in zip(rows, keys, strict=True):
        alias = row._state.db or ""
        shard = shards[alias]
        if shard is None or shard.group != options.group:
            continue
        misplaced = numbers.get(key) != shard.number
        state: Any = row._state
        state.admin_identity = RowIdentity(
            alias=alias,
            pk=row.pk,
            key_name=key_name,
            key=row.__dict__.get(key_name),
            object_id=_object_id(row, alias if misplaced else None, key if named_by_key else None),
            misplaced=misplaced,
        )
        if misplaced:
            yield row


def _kept_identity(row: Model) -> RowIdentity | None:
    identity: RowIdentity | None = row._state.__dict__.get("admin_identity")
    if identity is None:
        return None
    now = (row._state.db, row.pk, row.__dict__.get(identity.key_name))
    return identity if now == (identity.alias, identity.pk, identity.key) else None


def _object_id(row: Model, alias: str | None = None, key: Any = None) -> str:
    """Return the object id of ``row``: ``alias`` or ``key``, followed by the primary key.

    If ``alias`` is not None, ``key`` is ignored. If both are None, the object id is the primary key
    alone.
    """
    pk = _escaped(row._meta.pk.get_prep_value(row.pk))
    if alias is not None:
        return f"{MISPLACED}{alias}{SEPARATOR}{pk}"
    return pk if key is None else f"{_escaped(key)}{SEPARATOR}{pk}"


def parse(options: ShardOptions, text: str, within: Shard | None = None) -> Identity:
    """Split ``text``, an object id in the form that :func:`object_id` returns, into its parts.

    :param within: the shard that the rest of the URL names; None if the URL names no shard. With a
        shard, ``text`` may be a primary key alone, as in links of Django's widgets.
    :raises InvalidObjectID: no row can have this object id, its shard key leads to no shard, or the
        request runs inside ``bound()`` with a different shard key.
    """
    first, separator, pk_text = text.partition(SEPARATOR)
    try:
        if separator and first.startswith(MISPLACED):
            shard = named_shard(options, first.removeprefix(MISPLACED))
            return Identity(options, shard, _pk(options, unquote(pk_text)), misplaced=True)
        if separator:
            key = read_key(options, unquote(first))
            return _identity(options, key, _pk(options, unquote(pk_text)), key)
        pk = _pk(options, unquote(first))
        if options.names_shard(options.model._meta.pk):
            return _identity(options, pk, pk, None)
    except InvalidFocus as exc:
        raise InvalidObjectID(str(exc)) from exc
    if within is None:
        raise InvalidObjectID(f"{text!r} does not tell on which shard the row is.")
    return Identity(options, within, pk)


def _identity(options: ShardOptions, routing_key: Any, pk: Any, key: Any) -> Identity:
    if key is not None or options.key is options.model._meta.pk:
        refuse_key(options, routing_key)
    shard = locate(options, routing_key)
    if shard is None:
        raise InvalidObjectID(f"Nothing is stored for the key {routing_key!r}.")
    return Identity(options, shard, pk, key)


def _pk(options: ShardOptions, text: str) -> Any:
    value = stored_value(options.model._meta.pk, text)
    if value is None:
        raise InvalidObjectID(f"{text!r} cannot be an id of {options.model._meta.verbose_name}.")
    return value


def _escaped(value: Any) -> str:
    text = str(value).replace("%", "%25").replace(SEPARATOR, "%7E")
    return f"%40{text[1:]}" if text.startswith(MISPLACED) else text
