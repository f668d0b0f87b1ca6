"""Signals that the database backends send."""

from __future__ import annotations

from django.dispatch import Signal

#: Signal that is sent after a physical session (server connection) was opened. ``sender`` is the
#: backend's ``DatabaseWrapper`` class, ``session`` is the driver's connection, ``pool`` is the
#: node's pool. A receiver may set session variables. They then hold for all statements of the
#: session, on every shard of the node. Do not set them in a receiver of ``connection_created``.
#: Django sends that signal for each alias, and after a ``SET``, the alias would keep the session
#: for itself.
session_opened = Signal()
