"""The scope of an admin request: one shard, the rows of one key, or the whole shard group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from django.core.exceptions import ValidationError
from django.http import HttpRequest, QueryDict
from django.utils.http import urlencode

from sharded_orm import runtime
from sharded_orm.admin.exceptions import InvalidFocus
from sharded_orm.exceptions import InvalidShardKey, RoutingError
from sharded_orm.models.sharding.bound_key import key_in_force
from sharded_orm.models.sharding.options import ShardOptions, target_field
from sharded_orm.models.sharding.same_key import needs_same_key
from sharded_orm.topology.model import Shard

SHARD_VAR, KEY_VAR = "_shard", "_key"
#: The name of the URL parameter that holds the query string of the changelist from which the user
#: came (see Django's ``get_preserved_filters()``).
_PRESERVED = "_changelist_filters"


@dataclass(frozen=True)
class ShardScope:
    """The part of a shard group that a request is about: one shard, one shard key, or the whole group.

    ``shard`` and ``key`` are the shard and the shard key that the URL names. If both are None, the
    scope is the whole group. ``home`` is the one shard to query: ``shard``, or the shard of
    ``key``. ``home`` is None for the whole group, and for a key that has no shard yet.
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
        """The alias of the shard ``home``; None if ``home`` is None."""
        return self.home.alias if self.home is not None else None

    @property
    def query(self) -> dict[str, str]:
        """The URL parameters that name this scope."""
        query = {SHARD_VAR: self.shard.alias} if self.shard is not None else {}
        return query if self.key is None else {**query, KEY_VAR: str(self.key)}

    @property
    def query_string(self) -> str:
        """The parameters of :attr:`query` as text, with a leading question mark.

        An empty string if the scope is the whole group.
        """
        return f"?{urlencode(self.query)}" if self.query else ""

    def restrict(self, rows: Any, *, partial: bool) -> Any:
        """Restrict the queryset ``rows`` to this scope.

        For one shard, the queryset is bound to the shard's alias by ``using()``. So a template can
        still evaluate it after the view, when no default shard is set.

        :param partial: used only if the scope is the whole group. Says what the query does if a
            shard does not answer. True: it leaves out the rows of this shard. False: it raises an
            error.
        """
        if self.everywhere:
            return rows.scatter(partial=partial)
        if self.key is not None and self.options.key is not None:
            rows = rows.filter(**{self.options.key.attname: self.key})
        return rows.using(self.home.alias) if self.home is not None else rows


def scope_of(request: HttpRequest, options: ShardOptions) -> ShardScope:
    """Return the scope of ``request`` for the model of ``options``.

    The URL is read once for each request and model. If the URL names a shard key, this costs a
    look-up in the directory, the table that records the shard of each key.

    :raises InvalidFocus: the URL names a shard or a key that does not exist. The error's message is
        a sentence for the user.
    """
    scopes = _scopes(request)
    scope: ShardScope | None = scopes.get(options.model)
    if scope is None:
        of_group: ShardScope | None = scopes.get(options.group)
        if of_group is not None:
            # The page has already set its scope by set_scope(), for another model of the shard
            # group. Use the same shard for this model. If related rows of the two models must have
            # equal shard keys, also use the same key.
            key = of_group.key if needs_same_key(of_group.options, options) else None
            scope = ShardScope(options, shard=of_group.home, key=key, home=of_group.home)
        else:
            scope = read_scope(request.GET, options)
        scopes[options.model] = scope
    return scope


def new_row_scope(request: HttpRequest, options: ShardOptions) -> ShardScope:
    """Return the scope for a new row: the scope that the URL of the add page names.

    If that URL names no shard or key, return the scope of the changelist from which the user came.

    :raises InvalidFocus: the URL names a shard or a key that does not exist.
    """
    scope = scope_of(request, options)
    if scope.everywhere and _PRESERVED in request.GET:
        try:
            return read_scope(QueryDict(request.GET[_PRESERVED]), options)
        except InvalidFocus:
            # The query string of the changelist names a wrong shard or key. Ignore that here,
            # because the changelist will show the error when the user goes back to it.
            return scope
    return scope


def set_scope(request: HttpRequest, scope: ShardScope) -> None:
    """Use ``scope`` (a shard, a key or the group) for all models of the group in this request."""
    scopes = _scopes(request)
    for name, other in list(scopes.items()):
        if other.options.group == scope.options.group:
            del scopes[name]
    scopes[scope.options.model] = scopes[scope.options.group] = scope


def _scopes(request: Any) -> dict[Any, ShardScope]:
    """Return the scopes stored on a request, keyed by model or by the name of a shard group."""
    scopes: dict[Any, ShardScope] = request.__dict__.setdefault("_sharded_orm_scopes", {})
    return scopes


def read_scope(values: Mapping[str, Any], options: ShardOptions) -> ShardScope:
    """Return the scope (a shard, a key or the whole group) that the URL parameters ``values`` name.

    Inside ``bound()``, which binds one shard key to the request, return the scope of this key.

    :raises InvalidFocus: the named shard or key does not exist, the rows of the key are not on the
        named shard, or ``bound()`` has bound another key.
    """
    alias, text = values.get(SHARD_VAR), values.get(KEY_VAR)
    shard = named_shard(options, alias) if alias else None
    bound_key = key_in_force(options.model) if options.key is not None else None
    if not text and bound_key is None:
        return ShardScope(options, shard=shard, home=shard)
    key = read_key(options, text) if text else bound_key and bound_key.value
    refuse_key(options, key)
    home = locate(options, key)
    if shard is not None and home != shard:
        raise InvalidFocus(
            f"The rows of {_name(options)} {key} are not on {shard.alias}.",
            home=home.alias if home is not None else None,
        )
    return ShardScope(options, shard=shard, key=key, home=home)


def refuse_key(options: ShardOptions, key: Any) -> None:
    """Refuse the shard key ``key`` if the request runs inside ``bound()`` with a different shard
    key.

    ``bound()`` puts one shard key in force for the whole request.

    :raises InvalidFocus: a different key is bound. The error's message is a sentence for the user.
    """
    bound_key = key_in_force(options.model)
    if bound_key is not None and key != bound_key.value:
        raise InvalidFocus(
            f"These pages show the rows of one {_name(options)}, which is not {key}."
        )


def named_shard(options: ShardOptions, alias: str) -> Shard:
    """Return the shard ``alias`` of the model's shard group.

    :raises InvalidFocus: the group has no such shard.
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
    """Return ``text`` as a value of the shard key, as the database would store it.

    :raises InvalidFocus: the key's field cannot have the value, or the model has no shard key.
    """
    field: Any = options.key
    if field is None:
        raise InvalidFocus(f"{options.model._meta.verbose_name} has no shard key of its own.")
    value = stored_value(field, text)
    if value is None:
        raise InvalidFocus(f"{text!r} cannot be a value of {_name(options)}.")
    return value


def stored_value(field: Any, text: Any) -> Any:
    """Return ``text`` as a value of ``field``, as the database would store it.

    For a foreign key, return a value of the field to which the foreign key refers. Return None if
    no row can have the value.
    """
    field = target_field(field)
    try:
        value = field.get_prep_value(field.to_python(text))
        # The validators of a number field refuse a number that the column cannot hold. If such a
        # number got into a list for ``__in``, SQLite would raise an error.
        field.run_validators(value)
    except (ValidationError, ValueError, TypeError, OverflowError):
        return None
    return value


def locate(options: ShardOptions, key: Any) -> Shard | None:
    """Return the shard to which the shard key ``key`` leads; None if the key has no shard yet.

    :raises InvalidFocus: no row can have the key, or the key leads to a shard that does not exist.
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
        # Do not show the text of the caught error. It names a shard, and the user may not be
        # allowed to see that shard.
        raise InvalidFocus(f"{_name(options)} {key!r} leads to no shard.") from exc


def _name(options: ShardOptions) -> str:
    return str(options.key.verbose_name) if options.key is not None else "the key"
