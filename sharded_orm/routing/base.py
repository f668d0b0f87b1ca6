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

# Take random numbers from the operating system. With a seeded generator, forked processes could
# draw the same shards in the same order.
_random = random.SystemRandom()


class Strategy(ABC):
    """Finds the shard of a key. All threads of a process share one instance for each group.

    :param group: the group that uses the strategy; its shards are numbered from 0.
    :param options: ``STRATEGY_OPTIONS`` of the group.
    """

    #: Names of the ``STRATEGY_OPTIONS`` that the strategy accepts.
    option_names: ClassVar[frozenset[str]] = frozenset()
    #: Whether the strategy records the shard of each key. Then a new key must be placed by
    #: :meth:`place`, before :meth:`locate` can find its shard. False if it computes the shard.
    places: ClassVar[bool] = False
    #: Which bits of a key are the shard number, as ``(shift, number of bits)``: for example,
    #: ``(46, 16)`` means bits 46 to 61. None if keys do not contain a shard number.
    embedded: tuple[int, int] | None = None
    #: Tells what the shard of a key depends on. The library needs this to refuse a change of the
    #: group's topology that would change the shards of keys. For example, with ``COMPUTED``, they
    #: depend on the number of shards, so this number must stay. The default is ``PLACED`` if
    #: ``places`` is true, ``EMBEDDED`` if a subclass sets ``embedded``, and otherwise ``COMPUTED``.
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
        #: A function that gets a shard. It returns an exception if this process knows that the
        #: shard's node is down, otherwise None. ``runtime`` sets this attribute.
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
        """Whether a key that has rows may move to another shard, as by ``manage.py keys move``.

        If so, an operation records each key whose shard it uses. At its end, it can check whether
        one of them has moved meanwhile; see :mod:`sharded_orm.routing.placement_uses`.
        """
        return False

    def accepts(self, kind: type) -> bool:
        """Return False if no key of the type ``kind`` can have a shard. ``kind`` is int or str.

        A system check calls this. A strategy that does not know returns True.
        """
        return True

    @abstractmethod
    def locate(self, key: Any) -> int | None:
        """Return the number of the shard of ``key``; None if the key has no shard. Never writes.

        A key without a shard has no rows: it is not placed yet, or it can never have rows, such as
        a negative id. So a query for it finds nothing, as in an unsharded database.

        :raises InvalidShardKey: the key is of a type that the strategy does not accept.
        """

    def locate_many(self, keys: Iterable[Any]) -> dict[Any, int | None]:
        """Do the same as :meth:`locate` for many keys. A strategy with a table needs few queries.

        Return a dict that maps each key to the number of its shard, or to None.
        """
        return {key: self.locate(key) for key in keys}

    def place(self, key: Any) -> int:
        """Return the number of the shard of ``key``; if it has none yet, choose and record a shard.

        Call this before the first row of the key is written. If several threads or processes place
        the same key at the same time, all get the same shard.

        :raises InvalidShardKey: no row can have the key.
        """
        if not self.places and (number := self.locate(key)) is not None:
            return number
        return self.place_many([key])[key]

    def place_many(self, keys: Iterable[Any]) -> dict[Any, int]:
        """Do the same as :meth:`place` for many keys. Return a dict from key to shard number.

        :raises InvalidShardKey: no row can have one of the keys.
        """
        numbers: dict[Any, int] = {}
        for key, number in self.locate_many(keys).items():
            if number is None:
                raise self.refusal(key)
            numbers[key] = number
        return numbers

    def place_new(self, keys: Iterable[Any]) -> dict[Any, int]:
        """Do the same as :meth:`place_many`, but without looking up the keys first.

        Call this after :meth:`locate` has returned None for each of the keys. A strategy that
        stores the shards of keys in a table then saves a query.
        """
        return self.place_many(keys)

    def moved_to(self, key: Any) -> int | None:
        """Return the number of the shard of ``key`` if the key has ever moved; otherwise None.

        Also return None inside Django's ``TestCase``, where no key moves.
        """
        return None

    def has_moved_keys(self) -> bool:
        """Return whether any key of the group may ever have moved to another shard.

        In an event loop, Django refuses queries, so the result is False there. This does no harm: a
        queryset that is built in an event loop is evaluated in another thread, and then this method
        is called again.
        """
        return False

    def version(self, key: Any) -> int:
        """Return a number that changes each time ``key`` moves to another shard; 0 at first."""
        return 0

    def draw(self) -> int:
        """Return the number of a random shard that is open for new keys.

        A shard in a range of weight 2 is drawn twice as often as a shard in a range of weight 1.
        Nodes that this process knows to be down are left out.

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
            # Ask only for the node of this shard, and for another node only if this one is down.
            # node_failure() may try to connect to the node, so calls for all nodes would take long.
            failure = self.node_failure(self.group.shard(number))
            if failure is None:
                return number
            failures[chosen.primary] = failure
            ranges = tuple(r for r in ranges if r.primary not in failures)
        raise NoReachableShard(self.group.name, dict(sorted(failures.items())))

    def succeed(self, former: Strategy) -> None:  # noqa: B027  # most strategies have no state
        """Take over what another strategy has in memory, so that no query must read it again.

        Called when a new topology is applied, because then each group gets a new strategy.

        :param former: the strategy that the group used before the topology changed.
        """

    def explain(self, key: Any) -> str:
        """Return why ``key`` is on its shard, as a text for people, such as "7 % 4"."""
        return f"{self.group.strategy} of {key!r}"

    def refusal(self, key: Any) -> InvalidShardKey:
        """Return the error to raise when a row is written with a key that cannot have a shard.

        Called for strategies that compute the shard, after :meth:`locate` has returned None.
        """
        return self.invalid(key, "keys that it gives a shard")

    def invalid(self, key: Any, expected: str) -> InvalidShardKey:
        """Return the error for a key that the strategy does not accept.

        :param expected: which keys it accepts, as the end of a sentence, such as "integers and
            text".
        """
        return InvalidShardKey(
            f"{key!r} ({type(key).__name__}) cannot be a shard key of group {self.group.name!r}:"
            f" its strategy {self.group.strategy!r} takes {expected}."
        )


def exact_text(key: str, strategy: Strategy) -> str:
    """Return ``key``, after checking that every database driver sends the same text for it.

    :raises InvalidShardKey: ``key`` is of a subclass of str whose ``str(key)`` is a different text.
        For example, with ``class Kind(str, Enum)``, the member ``Kind.A = "a"`` has the characters
        "a", but ``str(Kind.A)`` is "Kind.A". The drivers of MariaDB and MySQL would send "Kind.A",
        the driver of SQLite "a".
    """
    if type(key) is not str and str(key) != key:
        raise strategy.invalid(
            key, f"text whose str() is the same, not {str(key)!r}: pass its value"
        )
    return key


def utf8_bytes(key: str, strategy: Strategy) -> bytes:
    """Return ``key`` encoded as UTF-8.

    :raises InvalidShardKey: UTF-8 cannot encode the key, because it has a lone surrogate such as
        "\\ud800"; or :func:`exact_text` refuses it.
    """
    try:
        return exact_text(key, strategy).encode()
    except UnicodeEncodeError as exc:
        raise strategy.invalid(key, "text that UTF-8 can encode") from exc


def strategy_class(group: ShardGroup) -> type[Strategy]:
    """Return the class of the strategy whose name is in the settings of ``group``.

    :raises InvalidConfiguration: the name is neither that of a built-in strategy nor a path that
        can be imported, or it is not the path of a subclass of :class:`Strategy`.
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
    """Return what determines the shard of a key in ``group``; see :attr:`Strategy.key_routing`.

    No instance of the strategy is created.

    :raises InvalidConfiguration: the settings of ``group`` do not contain a valid strategy class.
    """
    return strategy_class(group).key_routing
