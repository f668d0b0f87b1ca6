"""The time that a test waits for an event."""

from __future__ import annotations

#: Seconds until an event counts as missing. A wait ends with its event, so a large value costs a
#: test nothing. It must be far above what a machine under several times its load needs.
PATIENCE = 600.0
