"""The shards of a scatter that did not answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from django.db import InterfaceError, OperationalError

from sharded_orm.exceptions import ScatterError

if TYPE_CHECKING:
    from sharded_orm.topology.model import Shard

# MySQL errors that concern single shards of a batch: their schema, table or column, our
# rights on them. The batch is halved until the shards that fail are known.
_ONE_SHARD = frozenset({1044, 1049, 1054, 1109, 1142, 1143, 1146, 1932})
# Errors of the connection: the other batches of the node are not tried.
_NODE_GONE = frozenset({1040, 1045, 1053, 1129, 1130, 1203})
# Errors of the server's state, not of the statement: full, locked, killed, read-only.
_STATE = frozenset(
    {1020, 1021, 1030, 1034, 1037, 1038, 1041, 1135, 1194, 1195, 1205, 1213, 1290, 1317, 1836, 1927}
    | {1969, 3024}
)
# A scatter that will fail anyway stops to look for the shards after so many.
_ENOUGH = 8


class Failures:
    """The shards that did not answer, in one scatter.

    Without ``partial`` the first failure ends the scatter with :exc:`ScatterError`.
    With it, ``report`` gets one such error when the scatter is over.
    """

    def __init__(
        self,
        asked: int,
        *,
        partial: bool = False,
        report: Callable[[ScatterError], None] | None = None,
    ) -> None:
        self.asked = asked
        self.partial = partial
        self.causes: dict[str, BaseException] = {}
        self._report = report

    def add(self, shards: Iterable[Shard], cause: BaseException) -> None:
        for shard in shards:
            self.causes[shard.alias] = cause

    def check(self) -> None:
        """Raise what was added, unless partial results are wanted."""
        if self.causes and not self.partial:
            raise self.error() from next(iter(self.causes.values()))

    @property
    def hopeless(self) -> bool:
        return not self.partial and len(self.causes) >= _ENOUGH

    def error(self) -> ScatterError:
        return ScatterError(self.causes, self.asked)

    def finish(self) -> None:
        if self.causes and self.partial and self._report is not None:
            self._report(self.error())


def is_failure(error: Exception) -> bool:
    """Whether the shard did not answer, rather than the query being wrong."""
    code = _code(error)
    if not isinstance(code, int):
        return isinstance(error, OperationalError | InterfaceError)
    return is_node_gone(error) or code in _ONE_SHARD or code in _STATE or code == 0


def is_node_gone(error: BaseException) -> bool:
    code = _code(error)
    # The client library's own errors are numbered from 2000.
    return isinstance(code, int) and (code in _NODE_GONE or 2000 <= code < 3000)


def _code(error: BaseException) -> Any:
    return error.args[0] if error.args else None


def concerns_one_shard(error: BaseException) -> bool:
    """Whether other shards of the same statement may well answer."""
    return _code(error) in _ONE_SHARD
