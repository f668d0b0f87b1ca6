"""Failures of shards, in words for users of the admin."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from sharded_orm import runtime
from sharded_orm.exceptions import ShardDatabaseMissing
from sharded_orm.operations.runs.redaction import without_accounts
from sharded_orm.scatter.failures import is_node_gone
from sharded_orm.topology.model import Shard

# Errors of MySQL that refuse a login. Their text holds nothing but the account; see is_node_gone().
_LOGIN = frozenset({1044, 1045, 1698})


@dataclass(frozen=True)
class Failed:
    """Shards of one node that failed with the same error."""

    node: str
    aliases: tuple[str, ...]
    cause: str

    def __str__(self) -> str:
        count = len(self.aliases)
        if count == 1:
            shards = self.aliases[0]
        else:
            shards = f"{count} shards ({self.aliases[0]} … {self.aliases[-1]})"
        return f"{shards} on {self.node}: {self.cause}"


def cause_of(error: BaseException) -> str:
    """``error`` in a sentence, without the account that the server refused."""
    code = error.args[0] if error.args else None
    if isinstance(code, int) and code in _LOGIN:
        return f"access denied ({code})"
    text = without_accounts(str(error.args[-1])) if error.args else ""
    if isinstance(code, int) and is_node_gone(error):
        return f"the node does not answer ({text or code})"
    if isinstance(error, ShardDatabaseMissing):
        # The text of this error differs from shard to shard, and names folders of the server.
        return "its schema or file does not exist"
    name = type(error).__name__
    return f"{name}: {text}" if text else name


def by_node(errors: Mapping[str, BaseException]) -> list[Failed]:
    """Take together the shards of a node that failed with the same error.

    :param errors: alias -> error.
    """
    topology = runtime.topology()
    aliases_by_cause: dict[tuple[str, str], list[str]] = {}
    for alias, error in sorted(errors.items()):
        shard = topology.resolve(alias)
        node = shard.node if shard is not None else "an unknown node"
        aliases_by_cause.setdefault((node, cause_of(error)), []).append(alias)
    return [
        Failed(node, tuple(aliases), cause) for (node, cause), aliases in aliases_by_cause.items()
    ]


class Outages:
    """The errors of shards that are queried one after the other.

    The page waits once for a node that is gone: its other shards fail with the same error at once.
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
        """Whether the node of ``shard`` is gone; ``shard`` counts as failed then."""
        error = self._gone.get(shard.node)
        if error is not None:
            self.errors[shard.alias] = error
        return error is not None

    @property
    def failed(self) -> list[Failed]:
        return by_node(self.errors)


def join_names(names: Iterable[str], most: int = 8) -> str:
    """``a, b and 3 more``: at most ``most`` names, for a message."""
    all_names = list(names)
    more = f" and {len(all_names) - most} more" if len(all_names) > most else ""
    return ", ".join(all_names[:most]) + more


def outage_text(shard: Shard, error: BaseException) -> str:
    """The sentence that ``shard`` does not answer, with the cause."""
    return f"{shard.alias} on {shard.node} does not answer: {cause_of(error)}."
