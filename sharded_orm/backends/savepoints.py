"""Delay the statements that Django sends for savepoints, to save round trips.

Each of these statements is sent together with the next statement of the project. If the project
sends no statement before the savepoint ends, nothing is sent. The backends whose databases are
servers use this module.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

# Matches a statement about a savepoint of Django's atomic(), recognized by the form of its name,
# such as s1234_x1 (see BaseDatabaseWrapper.savepoint()). Does not match savepoints from the
# project's own SQL. These may use a name twice, or not be nested, as Django's always are.
_DJANGO = re.compile(r"(SAVEPOINT|ROLLBACK TO SAVEPOINT|RELEASE SAVEPOINT) ([`\"]s\d+_x\d+[`\"])$")


class SavepointAction(Enum):
    """What a statement does with a savepoint."""

    SAVEPOINT = "SAVEPOINT"
    ROLLBACK_TO = "ROLLBACK TO SAVEPOINT"
    RELEASE = "RELEASE SAVEPOINT"


@dataclass(frozen=True, slots=True)
class SavepointStatement:
    """A statement about one of Django's savepoints. ``name`` is quoted, as in the statement."""

    action: SavepointAction
    name: str


def parse_savepoint(sql: str) -> SavepointStatement | None:
    """Parse a statement about one of Django's savepoints.

    Return None for any other statement, such as one about a savepoint from the project's own SQL.
    """
    if sql[:1] not in "SR":
        return None
    match = _DJANGO.match(sql)
    return SavepointStatement(SavepointAction(match[1]), match[2]) if match else None


def record(statement: SavepointStatement, existing: list[str]) -> bool:
    """Record in ``existing`` what a statement about one of Django's savepoints does.

    :param existing: the names of the savepoints that exist, the oldest first.
    :returns: whether the savepoint existed before the statement.
    """
    action, name = statement.action, statement.name
    if action is SavepointAction.SAVEPOINT:
        existing.append(name)
        return False
    if name not in existing:
        return False
    # The savepoints inside this one end, too.
    del existing[existing.index(name) + (action is SavepointAction.ROLLBACK_TO) :]
    return True


def defer(
    statement: SavepointStatement, pending: list[bytes], existing: list[str], *, may_release: bool
) -> bool:
    """Process a statement about one of Django's savepoints. Return True if it need not be sent now.

    A SAVEPOINT is added to ``pending``. If its RELEASE comes before any other statement was sent,
    the SAVEPOINT is removed from ``pending``. So nothing is ever sent for an inner ``atomic()``
    block without statements.

    :param pending: the delayed statements, which are sent together with the next statement.
    :param existing: the names of the savepoints that exist, as :func:`record` keeps them. The
        program may release a savepoint twice. The second RELEASE fails, so it is sent at once.
    :param may_release: whether a RELEASE may be delayed, too. Pass True only if the server
        certainly has every savepoint of ``existing`` that is not in ``pending``.
    """
    action, name = statement.action, statement.name.encode()
    exists = record(statement, existing)
    created = b"SAVEPOINT " + name
    if action is SavepointAction.SAVEPOINT:
        pending.append(created)
        return True
    if created in pending:
        # The SAVEPOINT was not sent yet. So do not send its RELEASE or ROLLBACK TO. Instead, remove
        # the SAVEPOINT from the delayed statements, with the savepoints nested in it. After a
        # ROLLBACK TO, the savepoint still exists, so keep the SAVEPOINT itself.
        keep = action is SavepointAction.ROLLBACK_TO
        del pending[pending.index(created) + keep :]
        return True
    if action is SavepointAction.RELEASE and may_release and exists:
        pending.append(b"RELEASE SAVEPOINT " + name)
        return True
    return False
