"""Signals of the connection layer."""

from __future__ import annotations

from django.dispatch import Signal

#: A physical session was opened. ``sender`` is the backend's ``DatabaseWrapper`` class,
#: ``session`` the driver's connection, ``pool`` the node's pool. A receiver may set session
#: variables, which then hold for every statement on every shard. (``connection_created`` is sent for
#: each alias; a ``SET`` in its receiver would pin a session to the alias.)
session_opened = Signal()
