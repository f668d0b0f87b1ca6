"""Signals that the database backends send."""

from __future__ import annotations

from django.dispatch import Signal

#: Sent when a physical session (server connection) was opened. ``sender`` is the backend's
#: ``DatabaseWrapper`` class, ``session`` the driver's connection, ``pool`` the node's pool. A receiver
#: may set session variables, which then hold for each statement on any shard of the node. Do not do
#: that in a receiver of ``connection_created``: this signal is sent for each alias, and a ``SET`` would
#: make the alias keep a session for itself.
session_opened = Signal()
