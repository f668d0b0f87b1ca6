"""The base class of routing strategies: a strategy maps a shard key to a shard number.

A group of shards has one strategy. Some strategies compute the shard of a key. Others must *place*
a key before its first row is written: they choose the key's shard and record it. The setting
``STRATEGY`` is the name of a built-in strategy, or the dotted path of a subclass of
:class:`Strategy`.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

from django.utils.module_loading import import_string

from sharded_orm.exceptions import (
    InvalidConfiguration,
    InvalidShardKey,
    NoOpenShard,
    NoReachableShard,
)
from sharded_orm.topology.model import Shard, ShardGroup
from sharded_orm.topology.transitions import KeyRouting

BUILT_IN = {
    "directory": "sharded_orm.routing.directory.DirectoryStrategy",
    "modulo": "sharded_orm.routing.modulo.ModuloStrategy",
    "range": "sharded_orm.routing.range.RangeStrategy",
    "embedded": "sharded_orm.routing.embedded.EmbeddedStrategy",
}

# The random numbers come from the operating system and have no seed, so that two processes do not
# draw the same shards in the same order.
_random = random.SystemRandom()


class Strategy(ABC):
    """A routing strategy finds the shard of a key. All threads of a process share one instance.

    :param group: the group that uses the strategy; its shards are numbered from 0.
    :param options: ``STRATEGY_OPTIONS`` of the group.
    """

    #: Names of the ``STRATEGY_OPTIONS`` that the strategy accepts.
    option_names: ClassVar[frozenset[str]] = frozenset()
    #: Whether a key must be placed (its shard chosen and recorded) before :meth:`locate` finds its
    #: shard.
    places: ClassVar[bool] = False
    #: The position of the shard number in the bits of a key, as ``(shift, number of bits)``; None
    #: if keys do not contain a shard number.
    embedded: tuple[int, int] | None = None
    #: What determines the shard of a key. Changes of the group's topology must keep every key on
    #: its shard, so this says which of them are allowed. The default is ``PLACED`` if ``places`` is
    #: true, else ``EMBEDDED`` if a subclass sets ``embedded``, else ``COMPUTED``.
    key_routing: ClassVar[KeyRouting] = KeyRouting.COMPUTED

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "key_routing" not in vars(cls):
            if cls.places:
                cls.key_routing = KeyRouting.PLACED
            elif cls.embedded is not None:
                cls.key_routing = KeyRouting.EMBEDDED

    def __init__(self, group: ShardGroup, options: Mapping[str, Any]) -> None:
        self.group = group
        self.options = options
        #: A function that returns an exception if the node (database server) of a shard is known to
        #: be down, otherwise None. ``runtime`` sets this attribute.
        self.node_failure: Callable[[Shard], Exception | None] = lambda shard: None
        problems = [
            f"group {group.name!r}: unknown strategy option {name!r}; {group.strategy!r} takes"
            f" {sorted(self.option_names)!r}"
            for name in options
            if name not in self.option_names
        ]
        if problems:
            raise InvalidConfiguration(problems)

    @property
    def moves_keys(self) -> bool:
        """Whether a key with rows may move to another shard.

        If so, the strategy records each key that it looks up, so that a move during an operation is
        noticed; see :mod:`sharded_orm.routing.placement_uses`.
        """
        return False

    @abstractmethod
    def locate(self, key: Any) -> int | None:
        """Return the number of the shard of ``key``; None if the key has no shard. Never writes.

        None means that no row has the key: it is not placed yet, or :meth:`place` refuses it, such
        as a negative id. So a query for it finds nothing, as in an unsharded database.

        :raises InvalidShardKey: the key is of a type that the strategy does not accept.
        """

    def locate_many(self, keys: Iterable[Any]) -> dict[Any, int | None]:
        """Return the results of :meth:`locate` for many keys: a dict from key to shard number or None.

        A strategy that uses a database looks up hundreds of keys with one query.
        """
        return {key: self.locate(key) for key in keys}

    def place(self, key: Any) -> int:
        """Return the number of the shard of ``key``; if it has none yet, choose and record a shard.

        May be called concurrently, by threads and by processes.

        :raises InvalidShardKey: no row can have the key.
        """
        if not self.places and (number := self.locate(key)) is not None:
            return number
        return self.place_many([key])[key]

    def place_many(self, keys: Iterable[Any]) -> dict[Any, int]:
        """Return the results of :meth:`place` for many keys, as a dict from key to shard number.

        :raises InvalidShardKey: at least one of the keys is a key that no row can have.
        """
        numbers: dict[Any, int] = {}
        for key, number in self.locate_many(keys).items():
            if number is None:
                raise self.refusal(key)
            numbers[key] = number
        return numbers

    def place_new(self, keys: Iterable[Any]) -> dict[Any, int]:
        """Return the results of :meth:`place_many` for keys that have no shard yet.

        :meth:`locate` has returned None for each of ``keys``. So a strategy that uses a database
        need not look them up once more.
        """
        return self.place_many(keys)

    def moved_to(self, key: Any) -> int | None:
        """Return the number of the shard of ``key`` if the key has ever moved; otherwise None.

        Also return None inside Django's ``TestCase``, where no key moves.
        """
        return None

    def has_moved_keys(self) -> bool:
        """Whether any key may ever have moved to another shard.

        The result is False in an event loop, where Django refuses queries. A queryset that is built
        there is evaluated in another thread, and calls this method again in that thread.
        """
        return False

    def version(self, key: Any) -> int:
        """Return a number that changes each time ``key`` moves to another shard; 0 at first."""
        return 0

    def draw(self) -> int:
        """Return the number of a shard that is open for new keys, drawn at random.

        The probability of a shard is proportional to the weight of its range of shards in the
        topology. Nodes that this process knows to be down are left out.

        :raises NoOpenShard: no range is open.
        :raises NoReachableShard: all nodes with open ranges are known to be down.
        """
        ranges = self.group.open_ranges
        if not ranges:
            raise NoOpenShard(
                f"No shard of group {self.group.name!r} is open for new keys; add a range, or set"
                " 'open': True on one."
            )
        failures: dict[str, Exception] = {}
        while ranges:
            # The weight of a range counts for each shard in it. So 512 shards of weight 1 get as
            # many keys as 256 shards of weight 2.
            weights = [r.weight * (r.last - r.first + 1) for r in ranges]
            chosen = _random.choices(ranges, weights=weights)[0]
            number = _random.randint(chosen.first, chosen.last)
            # Call node_failure() only for the node that was drawn, because the call may try to
            # connect to the node.
            failure = self.node_failure(self.group.shard(number))
            if failure is None:
                return number
            failures[chosen.primary] = failure
            ranges = tuple(r for r in ranges if r.primary not in failures)
        raise NoReachableShard(self.group.name, dict(sorted(failures.items())))

    def succeed(self, former: Strategy) -> None:  # noqa: B027  # most strategies have no state
        """Take over what the strategy ``former`` remembers. The group used it before the topology
        changed.
        """

    def explain(self, key: Any) -> str:
        """Return the reason why ``key`` is on its shard, as text to be read by people."""
        return f"{self.group.strategy} of {key!r}"

    def refusal(self, key: Any) -> InvalidShardKey:
        """Return the error to raise when a row is written whose ``key`` has no shard.

        Called if :meth:`locate` has returned None for ``key``, and the strategy cannot choose
        shards for keys.
        """
        return self.invalid(key, "keys that it gives a shard")

    def invalid(self, key: Any, expected: str) -> InvalidShardKey:
        """Return the error for an invalid ``key``; ``expected`` describes the keys that are valid."""
        return InvalidShardKey(
            f"{key!r} ({type(key).__name__}) cannot be a shard key of group {self.group.name!r}:"
            f" its strategy {self.group.strategy!r} takes {expected}."
        )


def exact_text(key: str, strategy: Strategy) -> str:
    """Return ``key`` if every database driver sends the same text for it.

    :raises InvalidShardKey: ``str(key)`` differs from the characters of ``key``, for example if
        ``key`` is an instance of ``class Kind(str, Enum)``. The drivers of MariaDB and MySQL would
        send ``str(key)``; the driver of SQLite would send the characters.
    """
    if type(key) is not str and str(key) != key:
        raise strategy.invalid(
            key, f"text whose str() is the same, not {str(key)!r}: pass its value"
        )
    return key


def utf8_bytes(key: str, strategy: Strategy) -> bytes:
    """Return ``key`` encoded as UTF-8.

    :raises InvalidShardKey: the key contains a lone surrogate, which no database would store; or
        :func:`exact_text` refuses the key.
    """
    try:
        return exact_text(key, strategy).encode()
    except UnicodeEncodeError as exc:
        raise strategy.invalid(key, "text that UTF-8 can encode") from exc


def strategy_class(group: ShardGroup) -> type[Strategy]:
    """Return the class of the strategy whose name is in the settings of ``group``.

    :raises InvalidConfiguration: the name cannot be imported (the message lists the built-in
        strategies), or it is not the name of a subclass of :class:`Strategy`.
    """
    path = BUILT_IN.get(group.strategy, group.strategy)
    try:
        cls = import_string(path)
    except ImportError as exc:
        raise InvalidConfiguration(
            [
                f"group {group.name!r}: STRATEGY {group.strategy!r} cannot be imported ({exc});"
                f" use one of {sorted(BUILT_IN)!r} or a dotted path"
            ]
        ) from exc
    if not (isinstance(cls, type) and issubclass(cls, Strategy)):
        raise InvalidConfiguration(
            [f"group {group.name!r}: STRATEGY {group.strategy!r} is not a Strategy class"]
        )
    return cls


def make_strategy(group: ShardGroup) -> Strategy:
    """Create the strategy whose name is in the settings of ``group``.

    :raises InvalidConfiguration: the name of the strategy or one of its options is not valid.
    """
    return strategy_class(group)(group, group.strategy_options)


def key_routing_of(group: ShardGroup) -> KeyRouting:
    """Return the attribute ``key_routing`` of the strategy class in the settings of ``group``.

    The attribute says what determines the shard of a key. No instance of the class is created.

    :raises InvalidConfiguration: the settings of ``group`` do not contain a valid strategy class.
    """
    return strategy_class(group).key_routing
