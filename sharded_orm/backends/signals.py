"""Signals that the database backends send."""

from __future__ import annotations

from django.dispatch import Signal

#: Signal that is sent when a physical session (server connection) was opened. ``sender`` is the
#: backend's ``DatabaseWrapper`` class, ``session`` is the driver's connection, ``pool`` is the
#: node's pool. A receiver may set session variables, which then hold for every statement on every
#: shard of the node. Do not set them in a receiver of ``connection_created``, which is sent for
#: each alias. The alias would then keep a session for itself, because ``SET`` leaves state in it.
session_opened = Signal()
