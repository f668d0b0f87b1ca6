"""Signals of the connection layer."""

from __future__ import annotations

from django.dispatch import Signal

#: A physical session was opened. ``sender`` is the backend's ``DatabaseWrapper`` class,
#: ``session`` the driver's connection, ``pool`` the node's pool. A receiver may set session
#: variables here: they then hold for every statement, on whatever shard it runs.
#: (``connection_created`` fires for each alias; a ``SET`` there would tie a session to it.)
session_opened = Signal()
