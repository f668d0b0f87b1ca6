"""System check of nodes: whether the driver accepts their settings.

The check asks no server.

==================  ==========================================================
``sharded_orm.E076``  the driver refuses the settings of a node
==================  ==========================================================
"""

from __future__ import annotations

from typing import Any

from django.core import checks
from django.core.exceptions import ImproperlyConfigured

from sharded_orm import runtime
from sharded_orm.operations.nodes import node_connection


@checks.register(checks.Tags.models)
def check_nodes(**kwargs: Any) -> list[checks.CheckMessage]:
    """Report the nodes whose settings the driver refuses, such as an option that it does not know."""
    messages: list[checks.CheckMessage] = []
    for name in runtime.topology().nodes:
        try:
            with node_connection(name):
                pass
        except ImproperlyConfigured as exc:
            messages.append(
                checks.Error(
                    f"Node {name!r} cannot be connected to: {exc}",
                    hint="Correct its settings in NODES, such as OPTIONS.",
                    id="sharded_orm.E076",
                )
            )
    return messages
