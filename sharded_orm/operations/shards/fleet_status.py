"""The state of nodes and shards, as dataclasses, and the sentences that describe problems."""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from sharded_orm import runtime
from sharded_orm.backends.sizes import ShardSize
from sharded_orm.operations.selection import numbers_text
from sharded_orm.topology.model import Shard, ShardGroup


@dataclass(frozen=True, slots=True)
class ShardStatus:
    """The state of one shard, as its primary reports it.

    :param state: ``"current"`` (all migrations that concern the shard are applied), ``"behind"``
        (some are not applied), ``"missing"`` (there is no schema) or ``"error"`` (the shard cannot
        be read).
    :param digest: a short text that identifies the set of applied migrations: two shards with the
        same digest have the same migrations.
    :param behind: number of migrations that are not applied.
    :param following: the first migration that is not applied; "" if all are applied.
    :param error: why the shard cannot be read; None if it can be read.
    :param size: the size; None if it was not read.
    """

    shard: Shard
    state: str
    digest: str | None = None
    behind: int = 0
    following: str = ""
    error: str | None = None
    size: ShardSize | None = None


@dataclass(frozen=True)
class GroupOnNode:
    """The states of the shards of one group that are on one node.

    Only shards that were selected for the report, and whose primary is the node, are included.
    """

    group: str
    shards: tuple[ShardStatus, ...]
    #: Names of schemas on this node that look like shards of the group, although the topology does
    #: not place these shards on the node.
    unexpected: tuple[str, ...] = ()

    def of_state(self, state: str) -> list[Shard]:
        return [entry.shard for entry in self.shards if entry.state == state]

    @property
    def bytes(self) -> int | None:
        """The total size of the shards in bytes; None if sizes were not read."""
        return (
            sum(entry.size.bytes for entry in self.shards if entry.size)
            if self._has_sizes
            else None
        )

    @property
    def rows(self) -> int | None:
        """The number of rows, as the database estimates it; None if it is not known."""
        rows = [entry.size.rows for entry in self.shards if entry.size is not None]
        return sum(filter(None, rows)) if self._has_sizes and None not in rows else None

    @property
    def _has_sizes(self) -> bool:
        return any(entry.size is not None for entry in self.shards)


@dataclass(frozen=True)
class NodeStatus:
    """The state of one node.

    :param error: why the node does not answer; None if it has answered. After an error, ``groups``
        is empty.
    :param expected: maps the name of each group to the number of its selected shards whose primary
        is the node.
    :param groups: the states of the node's shards, one item for each group.
    :param is_misconfigured: whether ``error`` is about the settings of the node. If so, no
        connection to the node was tried.
    :param remedy: what to do about ``error``; "" for the usual remedy of such errors.
    """

    name: str
    error: str | None
    expected: Mapping[str, int]
    groups: tuple[GroupOnNode, ...] = ()
    is_misconfigured: bool = False
    remedy: str = ""


@dataclass(frozen=True)
class FleetStatus:
    """The states of all queried nodes.

    ``problems`` has a sentence for each problem, which also says what to do.
    """

    nodes: tuple[NodeStatus, ...]

    @property
    def shards(self) -> Iterator[ShardStatus]:
        return (entry for node in self.nodes for group in node.groups for entry in group.shards)

    @property
    def problems(self) -> list[str]:
        return [problem for node in self.nodes for problem in _problems(node)]


def number_parser(group: ShardGroup) -> Callable[[str], int | None]:
    """Return a function that gets the name of a schema and returns the shard number in it.

    For example, it returns 42 for ``photos_00042``. It returns None if the name does not match the
    group's pattern of names. It does not check whether the group has a shard with this number.
    """
    pattern = "".join(
        re.escape(literal)
        + {"shard": r"(\d+)", "group": re.escape(group.name), None: ""}.get(field, ".*")
        for literal, field, _, _ in string.Formatter().parse(group.database_name)
    )

    def number_of(schema: str) -> int | None:
        match = re.fullmatch(pattern, schema)
        if match is None:
            return None
        number = int(match[1])
        return number if group.schema_name(number) == schema else None

    return number_of


def _problems(node: NodeStatus) -> Iterator[str]:
    if node.error is not None:
        counts = ", ".join(f"{count} of {group!r}" for group, count in node.expected.items())
        what, remedy = (
            "does not answer",
            "Mend the node, or its HOST, PORT, USER, PASSWORD and OPTIONS",
        )
        if node.is_misconfigured:
            what, remedy = "cannot be asked with its settings", "Correct the settings in NODES"
        yield (
            f"Node {node.name!r} {what}: {node.error}."
            + (f" Nothing is known of its shards, {counts}." if counts else "")
            + f" {node.remedy or remedy}, and check again."
        )
    for group in node.groups:
        yield from _group_problems(node.name, group)


def _group_problems(node: str, on_node: GroupOnNode) -> Iterator[str]:
    if missing := on_node.of_state("missing"):
        yield (
            f"{_count_phrase(missing)} not created on {node!r}: {aliases_text(missing)}. Run 'manage.py shards"
            f" create {selection_options(missing)}', then 'manage.py migrate_shards {selection_options(missing)}'."
        )
    if behind := on_node.of_state("behind"):
        first = next(
            shard_status for shard_status in on_node.shards if shard_status.state == "behind"
        )
        yield (
            f"{_count_phrase(behind)} behind on {node!r}: {aliases_text(behind)}; the first lacks"
            f" {first.behind} migration{'' if first.behind == 1 else 's'} from {first.following} on. Run 'manage.py migrate_shards"
            f" {selection_options(behind)}'."
        )
    yield from _error_problems(node, on_node)
    yield from _schema_problems(node, on_node)


def _error_problems(node: str, on_node: GroupOnNode) -> Iterator[str]:
    """Yield a sentence for each error. Shards with the same error are in one sentence."""
    by_error: dict[str, list[ShardStatus]] = {}
    for entry in on_node.shards:
        if entry.error is not None:
            error = entry.error.replace(entry.shard.alias, "").replace(entry.shard.schema, "")
            by_error.setdefault(error, []).append(entry)
    for entries in by_error.values():
        shards, text = [entry.shard for entry in entries], entries[0].error
        look = f"'manage.py shards sql {shards[0].alias}'."
        if len(shards) == 1:
            yield f"Shard {shards[0].alias!r} on {node!r} cannot be read ({text}). Look at it with {look}"
        else:
            yield (
                f"{len(shards)} shards of {on_node.group!r} on {node!r} cannot be read:"
                f" {aliases_text(shards)} ({text}). Look at the first with {look}"
            )


def _schema_problems(node: str, on_node: GroupOnNode) -> Iterator[str]:
    """Yield sentences about schemas on ``node`` that do not belong there.

    For each node to which some of these schemas belong, there is one sentence about all of them.
    One more sentence is about the schemas whose shards do not exist in the group.
    """
    group = runtime.topology().groups.get(on_node.group)
    by_home: dict[str | None, list[tuple[str, Shard | None]]] = {}
    for schema in on_node.unexpected:
        number = number_parser(group)(schema) if group is not None else None
        shard = None
        if group is not None and number is not None and number in group:
            shard = group.shard(number)
        by_home.setdefault(shard.node if shard else None, []).append((schema, shard))
    for home, schemas in by_home.items():
        schema, shard = schemas[0]
        if len(schemas) == 1:
            why = f"group {on_node.group!r} has no such shard"
            if shard is not None:
                why = f"shard {shard.number} of {on_node.group!r} is on {home!r}"
            yield (
                f"Schema {schema!r} does not belong on node {node!r}: {why}. If it is a copy that"
                " nobody needs, drop it; if it holds the rows, correct RANGES."
            )
            continue
        why = f"group {on_node.group!r} has no such shards"
        if home is not None:
            why = f"these shards of {on_node.group!r} are on {home!r}"
        yield (
            f"{len(schemas)} schemas do not belong on node {node!r}: {_first_five(repr(name) for name, _ in schemas)};"
            f" {why}. If they are copies that nobody needs, drop them; if they hold the rows, correct"
            " RANGES."
        )


def _count_phrase(shards: Sequence[Shard]) -> str:
    is_single = len(shards) == 1
    return (
        f"{len(shards)} shard{'' if is_single else 's'} of {shards[0].group!r}"
        f" {'is' if is_single else 'are'}"
    )


def aliases_text(shards: Sequence[Shard]) -> str:
    return _first_five(shard.alias for shard in shards)


def _first_five(names: Iterable[str]) -> str:
    all_names = list(names)
    more = len(all_names) - 5
    return ", ".join(all_names[:5]) + (f" and {more} more" if more > 0 else "")


def selection_options(shards: Sequence[Shard]) -> str:
    """Return command options that select ``shards``, such as ``--group photos --shards 0-7``.

    :param shards: shards of one group, sorted by number.
    """
    return f"--group {shards[0].group} --shards {numbers_text(shards)}"
