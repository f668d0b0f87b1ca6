"""How long a test waits for what must come."""

from __future__ import annotations

#: Seconds until what is waited for counts as missing. A wait ends with its event, so this costs a
#: test nothing; it must be far above what a machine under several times its load takes.
PATIENCE = 600.0
