"""The base class of the reading and of the writing querysets. It finds the shards of a query."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from asgiref.sync import sync_to_async
from django.core.exceptions import FieldError
from django.db.models.query import EmptyQuerySet
from django.db.models.sql import Query
from django.db.models.sql.where import AND, WhereNode

from sharded_orm import runtime
from sharded_orm.exceptions import CrossShardRelation, RoutingError, UnknownExpression
from sharded_orm.models.cached.queryset import CachedQuerySet
from sharded_orm.models.moves.scatter import keys_left_out
from sharded_orm.models.querysets.guesses import guess_of, shard_of
from sharded_orm.models.querysets.route import (
    Route,
    colocation,
    colocation_on,
    find_route,
    is_scoped,
    only_shard,
    plain_key,
    targets,
)
from sharded_orm.models.sharding import key_sources
from sharded_orm.models.sharding.colocation import Colocation
from sharded_orm.models.sharding.key_sources import KeyGuess
from sharded_orm.models.sharding.options import ShardOptions, shard_options
from sharded_orm.models.sharding.query import ShardedQuery
from sharded_orm.models.sharding.type_variables import M
from sharded_orm.scatter import Target
from sharded_orm.signals import scattered
from sharded_orm.topology.model import ShardGroup


class RoutedQuerySet(CachedQuerySet[M]):
    """A queryset that finds its shards each time it is evaluated; see :class:`ShardedQuerySet`."""

    _scatters = False
    _partial = False
    _is_using_called = False
    #: The alias on which the query is running now; None if it is not running. While it is set, the
    #: property ``db`` returns it without looking up the shards again.
    _running_on: str | None = None
    #: True if this read can use a guess, that is, the shard key that a source of keys remembers
    #: from an earlier look-up of the row. ``_guess`` is the guess that the read has used. See
    #: :mod:`sharded_orm.models.querysets.guesses`.
    _may_guess = False
    _guess: KeyGuess | None = None
    #: The errors of the shards that failed in a read with ``scatter(partial=True)``, keyed by
    #: alias.
    failed_shards: dict[str, BaseException] = {}

    def __init__(
        self, model: Any = None, query: Any = None, using: str | None = None, hints: Any = None
    ) -> None:
        if query is not None:
            refuse_other_query(model, query)
        super().__init__(model, query or ShardedQuery(model), using, hints)

    @property
    def _options(self) -> ShardOptions:
        options = shard_options(self.model)
        if options is None:
            raise FieldError(f"{self.model._meta.label} is not a sharded model.")
        return options

    def _is_pinned(self) -> bool:
        """Whether this queryset has the alias of a single database. False for the group's alias."""
        return self._db is not None and self._db != self._options.group

    def _is_pinned_by_using(self) -> bool:
        """Whether the caller has called ``using()`` with a shard.

        False if a related manager has set the alias of this queryset.
        """
        return self._is_using_called and self._is_pinned()

    def _names_alias(self) -> bool:
        return self._is_pinned()

    def __repr__(self) -> str:
        # A shell or an error page calls __repr__(). So it must not raise an error if the shard key
        # is missing or wrong.
        try:
            return super().__repr__()
        except RoutingError as exc:
            return f"<{type(self).__name__} of {self.model.__name__}, not evaluated: {exc}>"

    def _route(self) -> Route:
        return self._find_route()[0]

    def _find_route(
        self, sent: Query | None = None, *, ordered: bool = True
    ) -> tuple[Route, ShardGroup]:
        return find_route(
            self._options,
            self.query if sent is None else sent,
            self._hints,
            scatter=self._scatters,
            ordered=ordered,
            known_keys=key_sources.keys_of_read(),
        )

    @property
    def db(self) -> str:
        """The alias on which this query would run now.

        If the query needs exactly one shard, this is the shard's alias. If it needs several shards
        or none, it is the group's alias, which refuses SQL. So code that can only handle one
        database gets an error, and does not miss rows silently.
        """
        if self._running_on is not None:
            return self._running_on
        if self._is_pinned():
            return str(self._db)
        options = self._options
        if (shard := only_shard(options, self.query)) is not None:
            return shard.alias
        query_route = self._route()
        return query_route.aliases[0] if len(query_route.shards) == 1 else query_route.group

    def _destination(
        self, sent: Query | None = None, *, ordered: bool = True
    ) -> str | list[Target]:
        """Return where the query runs: an alias, or a list of shards with their queries.

        It is an alias if Django's own code can run the query on one database. Otherwise, the
        results of several shards must be merged.

        :param sent: the query that is checked instead of :attr:`query`. It has the same conditions,
            and only those parts of :attr:`query` that the statement will have.
        """
        if self._is_pinned():
            if not self._is_pinned_by_using():
                self._check_colocation_on(str(self._db), sent, ordered=ordered)
            return str(self._db)
        options = self._options
        if (shard := only_shard(options, self.query, ordered=ordered)) is not None:
            return shard.alias
        if self._may_guess and not (self._scatters or self._hints or is_scoped()):
            self._guess = guess_of(self.query, ordered=ordered)
            shard = None if self._guess is None else shard_of(options.group, self._guess)
            if shard is not None:
                return shard.alias
        query_route, group = self._find_route(sent, ordered=ordered)
        if len(query_route.shards) == 1 and not (
            query_route.by_values and query_route.shards[0] in keys_left_out(group.name)
        ):
            return query_route.aliases[0]
        if len(query_route.shards) > 1 and self._scatters:
            scattered.announce(self.model, query_route)
        return targets(options, group, self.query, query_route)

    def _check_colocation_on(
        self, alias: str, sent: Query | None = None, *, ordered: bool = True
    ) -> None:
        """Raise CrossShardRelation if the query reads rows that may be outside the shard ``alias``.

        The parameters are those of :meth:`_destination`.
        """
        options = self._options
        if runtime.topology().resolve(alias) is None:
            return
        if plain_key(options, self.query, ordered=ordered) is None:
            query = self.query if sent is None else sent
            colocation_on(options, alias).check(query, ordered=ordered)

    def _colocation(self, destination: str | list[Target]) -> Colocation:
        """Return a :class:`Colocation` for the statements that run at ``destination``.

        Its checks raise an error if a statement reads rows that may be stored on other shards.

        :param destination: the alias of a shard, or a list of shards, as :meth:`_destination`
            returns it.
        """
        if isinstance(destination, str):
            return colocation_on(self._options, destination)
        return colocation(self._options, frozenset(target.shard.number for target in destination))

    def _targets(self, *, ordered: bool = True) -> list[Target] | None:
        """Return the shards whose results must be merged, each with the query to send to it.

        Return None if no results must be merged. Then Django's own code can run the query on the
        alias :attr:`db`.
        """
        destination = self._destination(ordered=ordered)
        return None if isinstance(destination, str) else destination

    def _run_on(self, alias: str, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``run``, a method of Django, while :attr:`db` always returns ``alias``.

        Each use of :attr:`db` in ``run`` then returns ``alias`` without routing the query again.
        """
        self._running_on = alias
        try:
            return run(*args, **kwargs)
        finally:
            self._running_on = None

    def _for_target(self, target: Target) -> Self:
        """Return a copy of this queryset that runs the query of ``target`` on the target's shard.

        :param target: a shard and the query to send to it.
        """
        clone = self._chain()
        clone.query = target.query.chain()
        clone._db, clone._is_using_called = target.shard.alias, True
        if target.hidden is not None:
            query = clone.query
            alias = query.get_initial_alias()
            condition = target.hidden.condition(query.get_meta().db_table, alias)
            if condition is not None:
                query.where.add(WhereNode([condition], negated=True), AND)
        return clone

    def explain_routing(self) -> Route:
        """Return the :class:`Route` of this query: to which shards it is sent, and the reason.

        ``str()`` of the route is a sentence for people. This method does not send the query. It may
        query the directory, which stores the shard of each key.
        """
        if self._is_pinned():
            alias, group = str(self._db), self._options.group
            reason = f"using({alias!r}) names it"
            shard = runtime.topology().resolve(alias)
            if shard is None or shard.group != group:
                return Route(group, (), reason, outside=alias)
            return Route(group, (shard.number,), reason)
        return self._route()

    async def aexplain_routing(self) -> Route:
        """Return what :meth:`explain_routing` returns, for use in an event loop."""
        return await sync_to_async(self.explain_routing)()

    def scatter(self, *, partial: bool = False) -> Self:
        """Return a copy of this queryset whose query may go to every shard of its group.

        :param partial: what to do if a shard fails. False (the default): raise :exc:`ScatterError`.
            True: return the rows of the other shards, with the errors in :attr:`failed_shards`. A
            table or column that is missing on every shard raises :exc:`ScatterError` in any case,
            because the query may be wrong.
        """
        clone = self._chain()
        clone._scatters, clone._partial = True, partial
        return clone

    def using(self, alias: str | None) -> Self:
        """Return a copy of this queryset whose query runs in the database ``alias``.

        The conditions and subqueries of the query see only the rows of that database.
        """
        clone = super().using(alias)
        clone._is_using_called = True
        return clone

    def _clone(self) -> Self:
        clone = super()._clone()
        if self._is_using_called:
            clone._is_using_called = True
        if self._scatters:
            clone._scatters, clone._partial = True, self._partial
        return clone

    def __and__(self, other: Any) -> Any:
        self._refuse_other_alias(other)
        return super().__and__(other)

    def __or__(self, other: Any) -> Any:
        self._refuse_other_alias(other)
        return self._without_hints(other, super().__or__(other))

    def __xor__(self, other: Any) -> Any:
        self._refuse_other_alias(other)
        return self._without_hints(other, super().__xor__(other))

    def _combinator_query(self, combinator: str, *others: Any, **kwargs: Any) -> Any:
        self._refuse_other_alias(*others)
        combined = super()._combinator_query(combinator, *others, **kwargs)  # type: ignore[misc]  # missing in Django's type stubs
        if any(other._hints != self._hints for other in others):
            # The combined queryset has the routing hints of the first queryset. They may be wrong
            # for the rows of the other querysets, so remove them.
            combined._hints = {}
        return combined

    def _refuse_other_alias(self, *others: Any) -> None:
        # Django runs a combination such as ``a | b`` on the alias of the left queryset ``a``. If
        # ``b`` has the alias of another shard, its rows would be missing. So refuse different
        # aliases.
        for other in others:
            if isinstance(other, EmptyQuerySet) or isinstance(self, EmptyQuerySet):
                continue
            # The queryset ``other`` may come from a plain base manager of Django. Then it is not a
            # RoutedQuerySet, but it may still have an alias.
            alias = getattr(other, "_db", None)
            is_pinned = alias not in (None, self._options.group)
            if (self._is_pinned() or is_pinned) and alias != self._db:
                raise CrossShardRelation(
                    f"Querysets on {self._db!r} and {alias!r} cannot be combined: name one shard"
                    " with using() on the result, or leave using() out and filter by the key."
                )

    def _without_hints(self, other: Any, combined: Any) -> Any:
        # Django keeps the routing hints of the left queryset. If the right queryset ``other`` has
        # different hints, these may be wrong for its rows, so remove them.
        if isinstance(combined, RoutedQuerySet) and combined is not self and combined is not other:
            if combined._hints != other._hints:
                combined._hints = {}
            combined._scatters = self._scatters or getattr(other, "_scatters", False)
        return combined


def refuse_other_query(model: Any, query: Any) -> None:
    """Raise :exc:`UnknownExpression` if ``query`` is not the query of a sharded queryset.

    Some packages give their querysets a class of queries of their own. Such a query does not know
    the shards of instances, and may change its conditions after the shards were found.
    """
    if not isinstance(query, ShardedQuery) and isinstance(query, Query):
        raise UnknownExpression(
            f"A queryset of {model.__name__} was given a query of the class {type(query).__qualname__},"
            " which cannot find its shards. Use a queryset class that leaves the query to"
            " ShardedQuerySet, and put its conditions into get_queryset() of a ShardedManager."
        )
