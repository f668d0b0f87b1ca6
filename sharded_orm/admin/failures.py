"""Failures of shards, described for users of the admin."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from sharded_orm import runtime
from sharded_orm.exceptions import ShardDatabaseMissing
from sharded_orm.operations.runs.redaction import without_accounts
from sharded_orm.scatter.failures import is_node_gone
from sharded_orm.topology.model import Shard

# The numbers of MySQL's errors for a refused login. Look for these numbers before calling
# is_node_gone(), which returns True for some of them, although the node has answered. The page
# shows only the number of such an error, because its text names the database account.
_LOGIN = frozenset({1044, 1045, 1698})
_MOST_NAMES = 8


@dataclass(frozen=True)
class Failed:
    """Shards of one node that all failed for the same cause."""

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
    """Return the cause of ``error`` as text.

    The database account, which a server's error message may name, is removed.
    """
    code = error.args[0] if error.args else None
    if isinstance(code, int) and code in _LOGIN:
        return f"access denied ({code})"
    # Join the lines into one, because messages of PostgreSQL's client library have several lines.
    text = " ".join(without_accounts(str(error.args[-1])).split()) if error.args else ""
    if is_node_gone(error):
        return f"the node does not answer ({text or code})"
    if isinstance(error, ShardDatabaseMissing):
        # Do not show the text of ShardDatabaseMissing. It names a folder of the server, which users
        # need not see. The folder is also a different one for each shard, so the page could not
        # show all these failures together, as one cause.
        return "its schema or file does not exist"
    name = type(error).__name__
    return f"{name}: {text}" if text else name


def by_node(errors: Mapping[str, BaseException]) -> list[Failed]:
    """Return the failed shards, grouped by node and cause of the error.

    :param errors: the error of each failed shard, keyed by the shard's alias.
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
    """The errors of shards that one page queries one after the other.

    If a node (a database server) does not answer, the page waits for it only once. After the first
    error of the node, :meth:`is_lost` records the node's other shards as failed, and they are not
    queried.
    """

    def __init__(self) -> None:
        self.errors: dict[str, BaseException] = {}
        self._gone: dict[str, BaseException] = {}

    def add(self, shard: Shard, error: BaseException) -> None:
        self.errors[shard.alias] = error
        if is_node_gone(error):
            self._gone[shard.node] = error

    def is_lost(self, shard: Shard) -> bool:
        """Whether an earlier query of this request got no answer from the node of ``shard``.

        If so, also record ``shard`` as failed, with the error of the earlier query. The caller then
        does not query ``shard``.
        """
        error = self._gone.get(shard.node)
        if error is not None:
            self.errors[shard.alias] = error
        return error is not None

    @property
    def failed(self) -> list[Failed]:
        return by_node(self.errors)


def join_names(names: Iterable[str]) -> str:
    """Return one text with the first eight names and, if there are more, the number of the names
    that are left out.
    """
    all_names = list(names)
    left_out = len(all_names) - _MOST_NAMES
    return ", ".join(all_names[:_MOST_NAMES]) + (f" and {left_out} more" if left_out > 0 else "")


def outage_text(shard: Shard, error: BaseException) -> str:
    """Return a sentence that says that ``shard`` does not answer, and why."""
    return f"{shard.alias} on {shard.node} does not answer: {cause_of(error)}."
