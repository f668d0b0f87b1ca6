"""The scope of an admin request: one shard, the rows of one key, or the whole shard group."""

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
#: The parameter in which links of a changelist hand on its query (``get_preserved_filters()``).
_PRESERVED = "_changelist_filters"


@dataclass(frozen=True)
class ShardScope:
    """The part of a group that a request is about.

    ``shard`` and ``key`` are what the URL names; the whole group if both are None. ``home`` is
    the one shard to ask: that shard, or the key's. It is None if the key has no shard yet, and
    for the whole group.
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
        """The URL parameters that name this scope."""
        query = {SHARD_VAR: self.shard.alias} if self.shard is not None else {}
        return query if self.key is None else {**query, KEY_VAR: str(self.key)}

    @property
    def query_string(self) -> str:
        """The same parameters, encoded and with a question mark; empty if there are none."""
        return f"?{urlencode(self.query)}" if self.query else ""

    def restrict(self, rows: Any) -> Any:
        """The ``rows`` of this scope; for the whole group, those of the shards that answer.

        On one shard the queryset names the alias, so a template may read it after the view.
        """
        if self.everywhere:
            return rows.scatter(partial=True)
        if self.key is not None and self.options.key is not None:
            rows = rows.filter(**{self.options.key.attname: self.key})
        return rows.using(self.home.alias) if self.home is not None else rows


def scope_of(request: HttpRequest, options: ShardOptions) -> ShardScope:
    """The scope of ``request`` for this model.

    Read once per request and model. Costs a look-up in the directory if the URL names a key.

    :raises InvalidFocus: there is no such shard or key; a sentence for the user.
    """
    scopes = _scopes(request)
    scope: ShardScope | None = scopes.get(options.model)
    if scope is None:
        of_group: ShardScope | None = scopes.get(options.group)
        if of_group is not None:
            # The page is about a row, or a key, of another model of the group.
            scope = ShardScope(options, shard=of_group.home, home=of_group.home)
        else:
            scope = read_scope(request.GET, options)
        scopes[options.model] = scope
    return scope


def new_row_scope(request: HttpRequest, options: ShardOptions) -> ShardScope:
    """The scope for a new row: that of its URL, or else of the changelist that led to the page.

    :raises InvalidFocus: see :func:`scope_of`.
    """
    scope = scope_of(request, options)
    if scope.everywhere and _PRESERVED in request.GET:
        try:
            return read_scope(QueryDict(request.GET[_PRESERVED]), options)
        except InvalidFocus:
            return scope  # The changelist will say so.
    return scope


def set_scope(request: HttpRequest, scope: ShardScope) -> None:
    """Make ``scope`` that of the request from now on, for all models of the group."""
    scopes = _scopes(request)
    for name, other in list(scopes.items()):
        if other.options.group == scope.options.group:
            del scopes[name]
    scopes[scope.options.model] = scopes[scope.options.group] = scope


def _scopes(request: Any) -> dict[Any, ShardScope]:
    """The scopes of a request, by model and by name of a group."""
    scopes: dict[Any, ShardScope] = request.__dict__.setdefault("_sharded_orm_scopes", {})
    return scopes


def read_scope(values: Mapping[str, Any], options: ShardOptions) -> ShardScope:
    """The scope that a query string names.

    :raises InvalidFocus: see :func:`scope_of`.
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
    """The shard with that alias, of the model's group.

    :raises InvalidFocus: there is none.
    """
    shard = runtime.topology().resolve(alias)
    if shard is None or shard.group != options.group:
        last = runtime.group(options.group).count - 1
        raise InvalidFocus(
            f"There is no shard {alias!r} in group {options.group!r}: its shards are"
            f" {runtime.shard(options.group, 0).alias} to {runtime.shard(options.group, last).alias}."
        )
    return shard


def read_key(options: ShardOptions, text: str) -> Any:
    """The value of the shard key that ``text`` stands for, as the database would store it.

    :raises InvalidFocus: the field cannot have the value.
    """
    field: Any = options.key
    if field is None:
        raise InvalidFocus(f"{options.model._meta.verbose_name} has no shard key of its own.")
    value = stored_value(field, text)
    if value is None:
        raise InvalidFocus(f"{text!r} cannot be a value of {_name(options)}.")
    return value


def stored_value(field: Any, text: Any) -> Any:
    """``text`` as a stored value of ``field``, or of the field that a foreign key refers to.

    None if no row can have the value.
    """
    field = target_field(field)
    try:
        value = field.get_prep_value(field.to_python(text))
        # SQLite fails on a number that no column can hold, if the number is in a list.
        field.run_validators(value)
    except (ValidationError, ValueError, TypeError, OverflowError):
        return None
    return value


def locate(options: ShardOptions, key: Any) -> Shard | None:
    """The shard of a key; None while the key has none.

    :raises InvalidFocus: no row can have the key.
    """
    strategy = runtime.strategy(options.group)
    try:
        shard = runtime.locate(options.group, key)
        if shard is None and not strategy.places:
            raise strategy.refusal(key)
        return shard
    except InvalidShardKey as exc:
        raise InvalidFocus(f"{_name(options)} {key!r} leads to no shard: {exc}") from exc
    except RoutingError as exc:
        # The message of this error names the shard.
        raise InvalidFocus(f"{_name(options)} {key!r} leads to no shard.") from exc


def _name(options: ShardOptions) -> str:
    return str(options.key.verbose_name) if options.key is not None else "the key"
