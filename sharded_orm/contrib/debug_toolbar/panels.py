"""The SQL panel of django-debug-toolbar, with the statements of shards.

The toolbar's own panel only sees the connections in ``django.db.connections.all()``, and shards are
not among them. So this panel also installs an ``execute_wrapper`` on each shard group. The wrapper
is called for every statement on a shard of the group, even if the connection to the shard is opened
later.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, cast

from debug_toolbar.panels.sql import SQLPanel
from debug_toolbar.panels.sql.tracking import NormalCursorMixin
from django.db import connections
from django.db.backends.utils import CursorWrapper
from django.utils.functional import cached_property

from sharded_orm.backends.group.alias import GroupAliasMixin


class ShardSQLPanel(SQLPanel):
    """The toolbar's SQL panel, which also shows the statements of shards, with shard and node.

    Name the class in ``DEBUG_TOOLBAR_PANELS`` instead of ``debug_toolbar.panels.sql.SQLPanel``.

    A node is a database server with many shards. On MariaDB and MySQL, one statement may read many
    shards of a node. The panel shows such a statement once, with the group and the node.
    """

    #: The same id as the toolbar's own SQL panel, because the toolbar's views look up recorded
    #: statements by it.
    panel_id = SQLPanel.panel_id

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._wrappers = ExitStack()
        # The lock is needed because a query of many shards sends its statements from several
        # threads, one for each node.
        self._recording = threading.Lock()

    def enable_instrumentation(self) -> None:
        super().enable_instrumentation()
        for connection in connections.all():
            if isinstance(connection, GroupAliasMixin):
                self._wrappers.enter_context(connection.execute_wrapper(self._execute))

    def disable_instrumentation(self) -> None:
        self._wrappers.close()
        super().disable_instrumentation()

    def _execute(
        self,
        execute: Callable[..., Any],
        sql: Any,
        params: Any,
        many: bool,
        context: dict[str, Any],
    ) -> Any:
        return _Statement(self, context).send(
            lambda sql, params: execute(sql, params, many, context), sql, params
        )

    def record(self, **statement: Any) -> None:
        """Record an executed statement. Thread-safe."""
        with self._recording:
            super().record(**statement)

    @cached_property
    def content(self) -> str:
        """The HTML of the panel.

        The toolbar's template prints the alias of the shard of each statement. This method adds the
        name of the shard's node.
        """
        stats = self.get_stats()
        labels: dict[str, str] = {}
        for statement in stats["queries"]:
            if "label" in statement:
                labels[statement["alias"]] = statement["label"]
                statement["alias"] = statement["label"]
        stats["databases"] = [
            (labels.get(alias, alias), totals) for alias, totals in stats["databases"]
        ]
        return cast("str", super().content)


class _Statement(NormalCursorMixin, CursorWrapper):  # type: ignore[misc]  # the two bases declare callproc() with different types, and the panel calls neither
    """The toolbar's cursor, used for one statement.

    The panel calls only the toolbar's method ``_record()``, which runs a statement, measures it,
    and makes the description that the panel shows.

    :param context: the context that Django passes to an ``execute_wrapper``.
    """

    def __init__(self, panel: ShardSQLPanel, context: dict[str, Any]) -> None:
        cursor, connection = context["cursor"].cursor, context["connection"]
        if connection.shard is None:
            connection = _NodeConnection(connection, cursor)
        # The third argument is the "logger": the object to which the toolbar's cursor describes
        # statements.
        super().__init__(cursor, connection, self)
        self._panel = panel

    def send(self, execute: Callable[[Any, Any], Any], sql: Any, params: Any) -> Any:
        # The toolbar has no public method to run and measure a statement, so a private one is called.
        return self._record(execute, sql, params)

    def current_transaction_id(self, alias: str) -> str:
        # On PostgreSQL, the toolbar's cursor calls this method of its "logger", which is this object.
        return cast("str", self._panel.current_transaction_id(alias))

    def new_transaction_id(self, alias: str) -> str:
        return cast("str", self._panel.new_transaction_id(alias))

    def record(self, **statement: Any) -> None:
        shard = self.db.shard
        if shard is not None:
            node = shard.node
            statement["label"] = f"{shard.alias} on {node}"
        else:
            node = self.cursor.node
            statement["alias"] = statement["label"] = f"{self.db.alias} on {node}"
            # The statement reads many shards. Leave out its parameters: with parameters, the
            # toolbar would offer to run it again on the alias of the group, which is no single
            # database.
            statement["params"] = None
        self._panel.record(node=node, **statement)

    def _last_executed_query(self, sql: Any, params: Any) -> str:
        # Overrides the toolbar's method, which would keep a reference to this cursor on the
        # connection object.
        return cast("str", self.db.ops.last_executed_query(self.cursor, sql, params))


class _NodeConnection:
    """A substitute for the connection object of a shard group, for a statement on many shards.

    To describe a statement on PostgreSQL, the toolbar reads the state of the transaction from the
    driver's connection. The connection object of a group has none. So this object has the driver's
    connection to the node that runs the statement.
    """

    shard = None

    def __init__(self, group: Any, cursor: Any) -> None:
        self.alias, self.vendor, self.ops = group.alias, group.vendor, group.ops
        self.connection = getattr(cursor, "connection", None)
