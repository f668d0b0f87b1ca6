"""A row's name in URLs and in the log: enough to find it again, and no other one.

Most ids count per group or per shard, so an id alone does not tell where its row is. The
name holds the shard key as well, and the row is asked for by both where the key leads *now*:
a link survives the move of a key, and one that is forged or out of date finds nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from django.core.exceptions import ValidationError
from django.db.models import Model

from sharded_orm import runtime
from sharded_orm.admin.shard_scope import locate, named_shard, read_key
from sharded_orm.exceptions import InvalidFocus, InvalidObjectID, RoutingError
from sharded_orm.models.sharding.options import ShardOptions, shard_options, target_field
from sharded_orm.topology.model import Shard

SEPARATOR, AWAY = "~", "@"


@dataclass(frozen=True)
class Identity:
    """What a name says: look for ``pk`` on ``shard``, among the rows of ``key`` if there is one.

    ``away``: it names the shard because the key does not lead there.
    """

    options: ShardOptions
    shard: Shard
    pk: Any
    key: Any = None
    away: bool = False

    def among(self, rows: Any) -> Any:
        """The one row, or none, of ``rows``, on the shard."""
        conditions = {"pk": self.pk}
        if self.key is not None and self.options.key is not None:
            conditions[self.options.key.attname] = self.key
        return rows.using(self.shard.alias).filter(**conditions)


def object_id(row: Model) -> str:
    """The name of a stored row, as text for ``quote()``.

    - ``414~7``: shard key and primary key;
    - ``7``: the primary key, where that tells the shard by itself;
    - ``@photos_00003~7``: the shard and the primary key of a row that is not where its key leads.

    Costs a look-up in the directory for a key that was not met before; see :func:`warm`.
    """
    options = _options(type(row))
    pk = _escaped(row._meta.pk.get_prep_value(row.pk))
    if is_away(row):
        return f"{AWAY}{row._state.db}{SEPARATOR}{pk}"
    if options.names_shard(row._meta.pk):
        return pk
    return f"{_escaped(options.key_of(row))}{SEPARATOR}{pk}"


def is_away(row: Model) -> bool:
    """Whether a stored row is on another shard than its key leads to; nothing can write it there."""
    options = _options(type(row))
    alias = row._state.db
    here = runtime.topology().resolve(alias) if alias is not None else None
    if here is None or here.group != options.group:
        return False
    try:
        return options.locate(row) != here
    except RoutingError:
        return True


def warm(rows: Iterable[Model]) -> None:
    """Find the shards of all these rows' keys at once: one query, for :func:`object_id` of each."""
    keys: dict[str, dict[Any, None]] = {}
    for row in rows:
        options = _options(type(row))
        keys.setdefault(options.group, {})[options.key_of(row)] = None
    for group, found in keys.items():
        try:
            runtime.strategy(group).locate_many(found)
        except RoutingError:
            pass  # A key that leads nowhere; the others are asked for one by one.


def parse(options: ShardOptions, text: str, within: Shard | None = None) -> Identity:
    """What ``text``, as :func:`object_id` made it, names.

    :param within: the shard that the rest of the URL names: a primary key alone will do then,
        as in links that Django's widgets make.
    :raises InvalidObjectID: nothing can have that name, or its key has no shard.
    """
    first, separator, rest = text.partition(SEPARATOR)
    try:
        if separator and first.startswith(AWAY):
            shard = named_shard(options, first.removeprefix(AWAY))
            return Identity(options, shard, _pk(options, unquote(rest)), away=True)
        if separator:
            key = read_key(options, unquote(first))
            return _placed(options, key, _pk(options, unquote(rest)), key)
        pk = _pk(options, unquote(first))
        if options.names_shard(options.model._meta.pk):
            return _placed(options, pk, pk, None)
    except InvalidFocus as exc:
        raise InvalidObjectID(str(exc)) from exc
    if within is None:
        raise InvalidObjectID(f"{text!r} does not tell on which shard the row is.")
    return Identity(options, within, pk)


def _placed(options: ShardOptions, tells: Any, pk: Any, key: Any) -> Identity:
    shard = locate(options, tells)
    if shard is None:
        raise InvalidObjectID(f"Nothing is stored for the key {tells!r}.")
    return Identity(options, shard, pk, key)


def _pk(options: ShardOptions, text: str) -> Any:
    value = stored_value(options.model._meta.pk, text)
    if value is None:
        raise InvalidObjectID(f"{text!r} cannot be an id of {options.model._meta.verbose_name}.")
    return value


def stored_value(field: Any, text: Any) -> Any:
    """``text`` as a value of ``field``, or of what that refers to; None if no row can have it."""
    field = target_field(field)
    try:
        value = field.get_prep_value(field.to_python(text))
        field.run_validators(value)  # SQLite takes no number that is too large in a list.
    except (ValidationError, ValueError, TypeError, OverflowError):
        return None
    return value


def _escaped(value: Any) -> str:
    text = str(value).replace("%", "%25").replace(SEPARATOR, "%7E")
    return f"%40{text[1:]}" if text.startswith(AWAY) else text


def _options(model: type[Model]) -> ShardOptions:
    options = shard_options(model)
    assert options is not None
    return options
