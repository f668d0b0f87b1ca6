"""What an admin's user reads of shards that did not answer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from sharded_orm import runtime
from sharded_orm.exceptions import ShardDatabaseMissing
from sharded_orm.operations.runs.redaction import without_accounts
from sharded_orm.scatter.failures import is_node_gone
from sharded_orm.topology.model import Shard

# MySQL's words on a refused login tell nothing but the account; see is_node_gone().
_LOGIN = frozenset({1044, 1045, 1698})


@dataclass(frozen=True)
class Failed:
    """Shards of one node that failed alike."""

    node: str
    aliases: tuple[str, ...]
    cause: str

    def __str__(self) -> str:
        count = len(self.aliases)
        if count == 1:
            which = self.aliases[0]
        else:
            which = f"{count} shards ({self.aliases[0]} … {self.aliases[-1]})"
        return f"{which} on {self.node}: {self.cause}"


def cause_of(error: BaseException) -> str:
    """``error`` in a sentence, without the account that was refused."""
    code = error.args[0] if error.args else None
    if isinstance(code, int) and code in _LOGIN:
        return f"access denied ({code})"
    text = without_accounts(str(error.args[-1])) if error.args else ""
    if isinstance(code, int) and is_node_gone(error):
        return f"the node does not answer ({text or code})"
    if isinstance(error, ShardDatabaseMissing):
        # Its own words differ from shard to shard, and name folders of the server.
        return "its schema or file does not exist"
    name = type(error).__name__
    return f"{name}: {text}" if text else name


def by_node(errors: Mapping[str, BaseException]) -> list[Failed]:
    """Alias -> error, with the shards of a node that failed alike taken together."""
    topology = runtime.topology()
    alike: dict[tuple[str, str], list[str]] = {}
    for alias, error in sorted(errors.items()):
        shard = topology.resolve(alias)
        node = shard.node if shard is not None else "an unknown node"
        alike.setdefault((node, cause_of(error)), []).append(alias)
    return [Failed(node, tuple(aliases), cause) for (node, cause), aliases in alike.items()]


class Outages:
    """The errors of shards that are asked one after the other.

    A node that is gone keeps one waiting once: its other shards fail with the same error.
    """

    def __init__(self, errors: Mapping[str, BaseException] | None = None) -> None:
        self.errors: dict[str, BaseException] = {}
        self._gone: dict[str, BaseException] = {}
        topology = runtime.topology()
        for alias, error in (errors or {}).items():
            shard = topology.resolve(alias)
            if shard is not None:
                self.add(shard, error)

    def add(self, shard: Shard, error: BaseException) -> None:
        self.errors[shard.alias] = error
        if is_node_gone(error):
            self._gone[shard.node] = error

    def is_lost(self, shard: Shard) -> bool:
        """Whether it is useless to ask ``shard``, which has failed then."""
        error = self._gone.get(shard.node)
        if error is not None:
            self.errors[shard.alias] = error
        return error is not None

    @property
    def failed(self) -> list[Failed]:
        return by_node(self.errors)


def listed(names: Iterable[str], most: int = 8) -> str:
    """Names for a message: the first ones, and how many more there are."""
    every = list(names)
    more = f" and {len(every) - most} more" if len(every) > most else ""
    return ", ".join(every[:most]) + more


def silence(shard: Shard, error: BaseException) -> str:
    """That ``shard`` does not answer, and why."""
    return f"{shard.alias} on {shard.node} does not answer: {cause_of(error)}."
