"""Measure the keys of a group's shards, and plan moves that balance these keys.

The group needs a directory, the table that records the shard of each key.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final

from django.apps import apps
from django.db.models import Count, Q
from django.utils import timezone

from sharded_orm import runtime
from sharded_orm.exceptions import InvalidShardKey
from sharded_orm.models.sharding.options import shard_options
from sharded_orm.operations.balancing import measure
from sharded_orm.operations.balancing.options import BalanceOptions
from sharded_orm.operations.balancing.planner import plan_balance
from sharded_orm.operations.balancing.problem import BalancePlan, BalanceProblem, Bin, Item
from sharded_orm.operations.balancing.step import BalanceStep, steps_of
from sharded_orm.operations.exceptions import BalanceRefused
from sharded_orm.operations.moves import preflight, record
from sharded_orm.operations.moves.group_keys import GroupKeys
from sharded_orm.operations.moves.request import keys_text
from sharded_orm.operations.relations import batched
from sharded_orm.topology.model import ShardGroup

#: A plan moves at most this many keys of one shard. If the shard has more keys, only those with the
#: largest sizes may move.
MOST_KEYS: Final = 20_000
_LOOK_UPS: Final = 500


@dataclass(frozen=True)
class KeyBalance:
    """A plan to move keys between the shards of a group.

    :param plan: the moves. Its items are the keys. The name of an item is the key as text. Its bins
        are the shards, named by their aliases.
    :param keys: maps the name of each item that moves to the value of the key. For example,
        ``{"7": 7}``.
    :param notes: sentences for an operator.
    """

    group: str
    plan: BalancePlan
    steps: tuple[BalanceStep, ...]
    keys: dict[str, Any]
    notes: list[str] = field(default_factory=list)

    def target(self, step: BalanceStep) -> int:
        """Return the number of the shard to which the keys of ``step`` move."""
        shard = runtime.topology().resolve(step.target)
        assert shard is not None
        return shard.number

    def values(self, step: BalanceStep) -> list[Any]:
        return [self.keys[move.item] for move in step.moves]


def plan_keys(group: str, options: BalanceOptions | None = None) -> KeyBalance:
    """Plan moves of keys between shards of ``group``. Changes nothing.

    The plan gives each shard keys or rows in proportion to the weight of the shard's range. Keys move
    only to shards that are open for new keys.

    :raises MoveRefused: keys of the group cannot be moved.
    :raises BalanceRefused: there is no plan; every reason is listed.
    :raises TopologyError: the source of the topology does not answer.

    The cost depends on ``options.by``:

    - "keys": one query of the directory (the table that records the shard of each key). For each
      shard above the threshold, also one query per model, which reads the keys of all rows.
    - "rows": the same queries, and one more per model and shard.
    - "load": only look-ups in the directory.
    """
    options = options or BalanceOptions(by=measure.KEYS)
    runtime.refresh()
    keys = preflight.check_group(group)
    topology_group = runtime.group(group)
    sizes = _key_loads(keys, options) if options.load is not None else None
    totals = _totals(topology_group, options.by) if sizes is None else _sums(sizes)
    notes: list[str] = []
    if sizes is None:
        sizes = {}
        for shard in _shards_above(topology_group, totals, options.threshold):
            sizes[shard] = _keys_on(keys, shard, by_rows=options.by == measure.ROWS)
            if len(sizes[shard]) > MOST_KEYS:
                notes.append(
                    f"shard {shard} has more than {MOST_KEYS:,} keys, of which the largest may move:"
                    " plan again afterwards"
                )
                sizes[shard] = _largest(sizes[shard])
    recent = _recent(group, options.cool_down)
    problem, values = _problem(topology_group, keys, totals, sizes, recent, options)
    plan = plan_balance(problem)
    return KeyBalance(
        group,
        plan,
        tuple(steps_of(plan.moves, lambda move: group)),
        {move.item: values[move.item] for move in plan.moves},
        notes,
    )


#: Maps the number of a shard to a dict that maps the shard's keys to their sizes.
_KeySizes = dict[int, dict[Any, float]]


def _problem(
    group: ShardGroup,
    keys: GroupKeys,
    totals: Mapping[int, float],
    sizes: _KeySizes,
    recent: frozenset[str],
    options: BalanceOptions,
) -> tuple[BalanceProblem, dict[str, Any]]:
    """Return the problem of balancing keys, and a dict such as ``{"7": 7}``.

    The items of the problem are keys, and its bins are shards. The dict maps the name of each item
    to the value of its key.
    """
    open_shards = frozenset(
        group.shard(number).alias
        for part in group.open_ranges
        for number in range(part.first, part.last + 1)
    )
    items: list[Item] = []
    values: dict[str, Any] = {}
    for number, of_shard in sizes.items():
        for value, size in of_shard.items():
            name = str(value)
            values[name] = value
            targets = frozenset[str]() if keys.text(value) in recent else open_shards
            items.append(Item(name, group.shard(number).alias, size, targets))
    bins = tuple(
        Bin(
            shard.alias,
            group.range_of(shard.number).weight or 1.0,
            max(0.0, totals.get(shard.number, 0) - sum(sizes.get(shard.number, {}).values())),
        )
        for shard in group.shards()
    )
    return BalanceProblem(bins, tuple(items), options.threshold, options.reach), values


# ##### What the shards have #####


def _totals(group: ShardGroup, by: str) -> dict[int, float]:
    """Map the number of each shard to its number of keys or rows."""
    if by == measure.KEYS:
        counts = measure.key_counts([group.name])
        return {shard.number: counts.get(shard.alias, 0) for shard in group.shards()}
    return {
        shard.number: float(
            sum(model._base_manager.using(shard.alias).count() for model in _models(group.name))
        )
        for shard in group.shards()
    }


def _sums(sizes: _KeySizes) -> dict[int, float]:
    return {number: sum(of_shard.values()) for number, of_shard in sizes.items()}


def _shards_above(
    group: ShardGroup, totals: Mapping[int, float], threshold: float
) -> Iterator[int]:
    """Yield the numbers of the shards that have clearly more than their share of all keys or rows.

    The share of a shard is proportional to the weight of its range.

    :param totals: maps the number of each shard to its number of keys or rows.
    :param threshold: for example, 0.1 yields the shards that have more than 110 % of their share.
    """
    weights = {n: group.range_of(n).weight or 1.0 for n in range(group.count)}
    mean = sum(totals.values()) / sum(weights.values())
    return (n for n, total in totals.items() if total > (1 + threshold) * mean * weights[n])


def _models(group: str) -> list[Any]:
    """Return the models of the group whose tables have a column for the shard key."""
    return [
        model
        for model in apps.get_models()
        if (options := shard_options(model)) is not None
        and options.group == group
        and options.key is not None
        and options.key in model._meta.local_concrete_fields
        and not model._meta.proxy
    ]


def _keys_on(keys: GroupKeys, number: int, *, by_rows: bool) -> dict[Any, float]:
    """Map each shard key that has rows on the shard ``number`` to the size of the key.

    The size of a key is its number of rows on the shard, or 1 if ``by_rows`` is False. A key is
    left out if the directory (the table that stores the shard of each key) places it on a different
    shard.
    """
    shard = runtime.shard(keys.group, number)
    counts: dict[Any, float] = {}
    for model in _models(keys.group):
        name = keys.fields[model._meta.label].attname
        rows = model._base_manager.using(shard.alias).order_by().values_list(name)
        for value, count in rows.annotate(number_of_rows=Count("*")):
            counts[value] = counts.get(value, 0) + count
    placed = _placements(keys, counts)
    return {
        value: count if by_rows else 1
        for value, count in counts.items()
        if placed.get(keys.text(value)) == number
    }


def _placements(keys: GroupKeys, values: Iterable[Any]) -> dict[str, int]:
    strategy: Any = runtime.strategy(keys.group)
    placed: dict[str, int] = {}
    for texts in batched(map(keys.text, values), _LOOK_UPS):
        placed |= {
            text: placement.shard
            for text, placement in strategy.store.find(keys.group, texts).items()
        }
    return placed


def _largest(sizes: Mapping[Any, float]) -> dict[Any, float]:
    by_size = sorted(sizes.items(), key=lambda item: -item[1])
    return dict(by_size[:MOST_KEYS])


def _key_loads(keys: GroupKeys, options: BalanceOptions) -> _KeySizes:
    """Return the loads of the keys in the operator's file, such as ``{3: {7: 0.5}}`` if the key 7
    is on the shard 3 and has the load 0.5.
    """
    loads = measure.read_load(options.load or "")
    try:
        values = {name: keys.value(name) for name in loads}
    except InvalidShardKey as exc:
        raise BalanceRefused([f"{options.load!r}: {exc}"]) from exc
    placed = _placements(keys, values.values())
    unplaced = [name for name, value in values.items() if keys.text(value) not in placed]
    if unplaced:
        raise BalanceRefused(
            [f"{options.load!r} has keys without a shard: {keys_text(unplaced)}. Leave them out"]
        )
    sizes: _KeySizes = {}
    for name, value in values.items():
        on_shard = sizes.setdefault(placed[keys.text(value)], {})
        # Add up the loads, because several names in the file, such as "7" and "07", may mean the
        # same key.
        on_shard[value] = on_shard.get(value, 0) + loads[name]
    return sizes


def _recent(group: str, cool_down: timedelta) -> frozenset[str]:
    """Return the keys that are moving, or have moved within ``cool_down``. One query."""
    since = timezone.now() - cool_down
    rows = record.rows().filter(Q(in_flight=True) | Q(switched_at__gt=since), group=group)
    return frozenset(rows.values_list("key", flat=True))
