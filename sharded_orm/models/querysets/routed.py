"""What reading and writing share: a queryset that knows the shards it is about."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from django.core.exceptions import FieldError
from django.db.models.query import EmptyQuerySet

from sharded_orm import runtime
from sharded_orm.exceptions import CrossShardRelation, ShardKeyRequired
from sharded_orm.models.cached.queryset import CachedQuerySet
from sharded_orm.models.querysets.route import (
    Route,
    colocation,
    colocation_on,
    only_shard,
    plain_key,
    route,
    targets,
)
from sharded_orm.models.sharding.colocation import Colocation
from sharded_orm.models.sharding.options import ShardOptions, shard_options
from sharded_orm.models.sharding.query import ShardedQuery
from sharded_orm.scatter import Target
from sharded_orm.signals import scattered
from sharded_orm.topology.model import ShardGroup


class RoutedQuerySet(CachedQuerySet):
    """Routes itself each time it runs; see :class:`ShardedQuerySet`."""

    _scatters = False
    _partial = False
    _named = False
    #: Where the query that runs right now was routed to: it is not routed again.
    _running_on: str | None = None
    #: After a read with ``scatter(partial=True)``: alias of each failed shard -> its error.
    failed_shards: dict[str, BaseException] = {}

    def __init__(
        self, model: Any = None, query: Any = None, using: str | None = None, hints: Any = None
    ) -> None:
        super().__init__(model, query or ShardedQuery(model), using, hints)

    @property
    def _options(self) -> ShardOptions:
        options = shard_options(self.model)
        if options is None:
            raise FieldError(f"{self.model._meta.label} is not a sharded model.")
        return options

    def _pinned(self) -> bool:
        # The group's own alias says no more than "somewhere in the group".
        return self._db is not None and self._db != self._options.group

    def _is_named(self) -> bool:
        """Whether ``using()`` has named a shard, and not a manager that Django has bound to one."""
        return self._named and self._pinned()

    def _names_alias(self) -> bool:
        return self._pinned()

    def __repr__(self) -> str:
        # What a shell or an error page shows; it must not fail for want of a key.
        try:
            return super().__repr__()
        except ShardKeyRequired as exc:
            return f"<{type(self).__name__} of {self.model.__name__}, not evaluated: {exc}>"

    def _route(self, group: ShardGroup | None = None, *, ordered: bool = True) -> Route:
        options = self._options
        group = group or runtime.group(options.group)
        scatters = self._scatters
        return route(options, group, self.query, self._hints, scatter=scatters, ordered=ordered)

    @property
    def db(self) -> str:
        """The alias this query runs on if it runs now; the group's alias if that is several.

        SQL on the group's alias is refused, so whatever is not prepared for several
        shards fails closed.
        """
        if self._running_on is not None:
            return self._running_on
        if self._pinned():
            return str(self._db)
        options = self._options
        if (shard := only_shard(options, self.query)) is not None:
            return shard.alias
        found = self._route()
        return found.aliases[0] if len(found.shards) == 1 else found.group

    def _destination(self, *, ordered: bool = True) -> str | list[Target]:
        """The one alias that Django's own code is right for, or the shards to merge."""
        if self._pinned():
            if not self._is_named():
                self._check_on(str(self._db), ordered=ordered)
            return str(self._db)
        options = self._options
        if (shard := only_shard(options, self.query, ordered=ordered)) is not None:
            return shard.alias
        group = runtime.group(options.group)
        found = self._route(group, ordered=ordered)
        if len(found.shards) == 1:
            return found.aliases[0]
        if len(found.shards) > 1 and self._scatters:
            scattered.announce(self.model, found)
        return targets(options, group, self.query, found)

    def _check_on(self, alias: str, *, ordered: bool = True) -> None:
        """Raise unless ``alias`` has all rows that this query is about."""
        options = self._options
        if runtime.topology().resolve(alias) is None:
            return
        if plain_key(options, self.query, ordered=ordered) is None:
            colocation_on(options, alias).check(self.query, ordered=ordered)

    def _colocation(self, where: str | list[Target]) -> Colocation:
        """What a statement may read that runs at this destination."""
        if isinstance(where, str):
            return colocation_on(self._options, where)
        return colocation(self._options, frozenset(target.shard.number for target in where))

    def _targets(self, *, ordered: bool = True) -> list[Target] | None:
        """The shards to merge; None when Django's own code on :attr:`db` is right."""
        where = self._destination(ordered=ordered)
        return None if isinstance(where, str) else where

    def _run_on(self, alias: str, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Django's own code on ``alias``; it asks for :attr:`db` up to three times."""
        self._running_on = alias
        try:
            return run(*args, **kwargs)
        finally:
            self._running_on = None

    def _on(self, target: Target) -> Self:
        """This queryset on one shard, with the query that the shard is asked."""
        clone = self._chain()
        clone.query = target.query.chain()
        clone._db, clone._named = target.shard.alias, True
        return clone

    def explain_routing(self) -> Route:
        """Where this query would go, and why. Runs no query but the directory's.

        ``str()`` of the answer is a sentence; it has ``shards``, ``aliases``, ``nodes``
        and ``reason``.
        """
        if self._pinned():
            alias, group = str(self._db), self._options.group
            reason = f"using({alias!r}) names it"
            shard = runtime.topology().resolve(alias)
            if shard is None or shard.group != group:
                return Route(group, (), reason, outside=alias)
            return Route(group, (shard.number,), reason)
        return self._route()

    def scatter(self, *, partial: bool = False) -> Self:
        """Allow this query to ask every shard of its group.

        :param partial: give the rows of the shards that answer instead of raising
            :exc:`ScatterError`; :attr:`failed_shards` then tells which did not. A table or
            column that a shard has not is left out like this only if another shard answers: if
            none does, the query may be wrong, and :exc:`ScatterError` is raised all the same.
        """
        clone = self._chain()
        clone._scatters, clone._partial = True, partial
        return clone

    def using(self, alias: str | None) -> Self:
        """The query on ``alias`` as it is: conditions and subqueries see this shard's rows only."""
        clone = super().using(alias)
        clone._named = True
        return clone

    def _clone(self) -> Self:
        clone = super()._clone()
        if self._named:
            clone._named = True
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
        return self._without_hints(other, super().__xor__(other))  # type: ignore[misc]  # not in the stubs

    def _combinator_query(self, combinator: str, *others: Any, **kwargs: Any) -> Any:
        self._refuse_other_alias(*others)
        combined = super()._combinator_query(combinator, *others, **kwargs)  # type: ignore[misc]  # not in the stubs
        if any(getattr(other, "_hints", None) != self._hints for other in others):
            combined._hints = {}  # They bound the first part only.
        return combined

    def _refuse_other_alias(self, *others: Any) -> None:
        # Django runs a combination on the alias of its left side, where the rows of the
        # other side are not.
        for other in others:
            if isinstance(other, EmptyQuerySet) or isinstance(self, EmptyQuerySet):
                continue
            # A base manager's queryset is not ours, and names an alias, too.
            alias = getattr(other, "_db", None)
            is_pinned = alias not in (None, self._options.group)
            if (self._pinned() or is_pinned) and alias != self._db:
                raise CrossShardRelation(
                    f"Querysets on {self._db!r} and {alias!r} cannot be combined: name one shard"
                    " with using() on the result, or leave using() out and filter by the key."
                )

    def _without_hints(self, other: Any, combined: Any) -> Any:
        # Django keeps the hints and alias of the left side, which bound that side only.
        if isinstance(combined, RoutedQuerySet) and combined is not self and combined is not other:
            if combined._hints != getattr(other, "_hints", None):
                combined._hints = {}
            combined._scatters = self._scatters or getattr(other, "_scatters", False)
        return combined
