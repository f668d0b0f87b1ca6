"""Where a request of the admin looks: a shard, the rows of one key, or the whole group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from django.core.exceptions import ValidationError
from django.http import HttpRequest, QueryDict
from django.utils.http import urlencode

from sharded_orm import runtime
from sharded_orm.exceptions import InvalidFocus, InvalidShardKey, RoutingError
from sharded_orm.models.sharding.options import ShardOptions, target_field
from sharded_orm.topology.model import Shard

SHARD_VAR, KEY_VAR = "_shard", "_key"
#: In which links of a changelist hand on its query (``ModelAdmin.get_preserved_filters``).
_PRESERVED = "_changelist_filters"


@dataclass(frozen=True)
class ShardScope:
    """A place to look at. ``shard`` and ``key`` are what was asked for; both None: everywhere.

    ``home`` is the one shard in question: that shard, or the one of the key; None if the key
    has no rows yet, or everywhere.
    """

    options: ShardOptions
    shard: Shard | None = None
    key: Any = None
    home: Shard | None = None

    @property
    def everywhere(self) -> bool:
        return self.shard is None and self.key is None

    @property
    def alias(self) -> str | None:
        """The alias of ``home``."""
        return self.home.alias if self.home is not None else None

    @property
    def query(self) -> dict[str, str]:
        """What a link needs to lead here."""
        found = {SHARD_VAR: self.shard.alias} if self.shard is not None else {}
        return found if self.key is None else {**found, KEY_VAR: str(self.key)}

    @property
    def query_string(self) -> str:
        """The same, encoded; empty or with a question mark."""
        return f"?{urlencode(self.query)}" if self.query else ""

    def of(self, rows: Any) -> Any:
        """The ``rows`` that are here; everywhere: of the shards that answer.

        On one shard the alias is named, so they may be read after the view, by a template.
        """
        if self.everywhere:
            return rows.scatter(partial=True)
        if self.key is not None and self.options.key is not None:
            rows = rows.filter(**{self.options.key.attname: self.key})
        return rows.using(self.home.alias) if self.home is not None else rows


def focus_of(request: HttpRequest, options: ShardOptions) -> ShardScope:
    """Where ``request`` looks, as far as models of this group are concerned.

    Made once per request and model. Costs a look-up in the directory if a key is named.

    :raises InvalidFocus: there is no such place; a sentence for the user.
    """
    kept = _kept(request)
    found: ShardScope | None = kept.get(options.model)
    if found is None:
        within: ShardScope | None = kept.get(options.group)
        if within is not None:
            # The page is about a row, or a key, of another model of the group.
            found = ShardScope(options, shard=within.home, home=within.home)
        else:
            found = read_focus(request.GET, options)
        kept[options.model] = found
    return found


def new_row_focus(request: HttpRequest, options: ShardOptions) -> ShardScope:
    """Where a new row is to be put: as its URL says, or else the changelist it was asked from.

    :raises InvalidFocus: see :func:`focus_of`.
    """
    found = focus_of(request, options)
    if found.everywhere and _PRESERVED in request.GET:
        try:
            return read_focus(QueryDict(request.GET[_PRESERVED]), options)
        except InvalidFocus:
            return found  # The changelist will say so.
    return found


def narrow(request: HttpRequest, focus: ShardScope) -> None:
    """From now on the request is about this place, for all models of the group."""
    kept = _kept(request)
    for name, found in list(kept.items()):
        if found.options.group == focus.options.group:
            del kept[name]
    kept[focus.options.model] = kept[focus.options.group] = focus


def _kept(request: Any) -> dict[Any, Any]:
    found: dict[Any, Any] = request.__dict__.setdefault("_sharded_orm_focus", {})
    return found


def read_focus(values: Mapping[str, Any], options: ShardOptions) -> ShardScope:
    """What a query string says.

    :raises InvalidFocus: see :func:`focus_of`.
    """
    alias, text = values.get(SHARD_VAR), values.get(KEY_VAR)
    shard = named_shard(options, alias) if alias else None
    if not text:
        return ShardScope(options, shard=shard, home=shard)
    key = read_key(options, text)
    home = locate(options, key)
    if shard is not None and home != shard:
        raise InvalidFocus(
            f"The rows of {_name(options)} {text} are not on {shard.alias}.",
            home=home.alias if home is not None else None,
        )
    return ShardScope(options, shard=shard, key=key, home=home)


def named_shard(options: ShardOptions, alias: str) -> Shard:
    """The shard of the group of ``options`` with that alias; raises :exc:`InvalidFocus`."""
    shard = runtime.topology().resolve(alias)
    if shard is None or shard.group != options.group:
        last = runtime.group(options.group).count - 1
        raise InvalidFocus(
            f"There is no shard {alias!r} in group {options.group!r}: its shards are"
            f" {runtime.shard(options.group, 0).alias} to {runtime.shard(options.group, last).alias}."
        )
    return shard


def read_key(options: ShardOptions, text: str) -> Any:
    """A value of the shard key from its text, as the database would store it.

    :raises InvalidFocus: the field cannot have it.
    """
    field: Any = options.key
    if field is None:
        raise InvalidFocus(f"{options.model._meta.verbose_name} has no shard key of its own.")
    value = stored_value(field, text)
    if value is None:
        raise InvalidFocus(f"{text!r} cannot be a value of {_name(options)}.")
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


def locate(options: ShardOptions, key: Any) -> Shard | None:
    """The shard of a key; None while it has none. Raises :exc:`InvalidFocus`."""
    strategy = runtime.strategy(options.group)
    try:
        shard = runtime.locate(options.group, key)
        if shard is None and not strategy.places:
            raise strategy.refusal(key)
        return shard
    except InvalidShardKey as exc:
        raise InvalidFocus(f"{_name(options)} {key!r} leads to no shard: {exc}") from exc
    except RoutingError as exc:
        # Its words name the shard.
        raise InvalidFocus(f"{_name(options)} {key!r} leads to no shard.") from exc


def _name(options: ShardOptions) -> str:
    return str(options.key.verbose_name) if options.key is not None else "the key"
