"""Defer savepoint statements, so that they are sent together with the next statement, or never.

The backends whose databases are servers use this module.
"""

from __future__ import annotations

import re
from enum import Enum

# Matches statements about Django's own savepoints, which have names from
# BaseDatabaseWrapper.savepoint(). Such savepoints nest, and no name is used twice.
_DJANGO = re.compile(r"(SAVEPOINT|ROLLBACK TO SAVEPOINT|RELEASE SAVEPOINT) ([`\"]s\d+_x\d+[`\"])$")


class SavepointStatement(Enum):
    """What a statement does with one of Django's savepoints."""

    SAVEPOINT = "SAVEPOINT"
    ROLLBACK_TO = "ROLLBACK TO SAVEPOINT"
    RELEASE = "RELEASE SAVEPOINT"


def savepoint_statement(sql: str) -> SavepointStatement | None:
    """Return which savepoint statement ``sql`` is (SAVEPOINT, RELEASE or ROLLBACK TO), if it is one
    of Django's; None for any other statement.
    """
    if sql[:1] not in "SR":
        return None
    match = _DJANGO.match(sql)
    return SavepointStatement(match[1]) if match else None


def defer(sql: str, pending: list[bytes], *, may_release: bool) -> bool:
    """Return True if a statement about one of Django's savepoints need not be sent now.

    A SAVEPOINT is put into ``pending``. A RELEASE or ROLLBACK may take its SAVEPOINT out again. So
    nothing is ever sent for a savepoint without other statements.

    :param sql: a statement for which :func:`savepoint_statement` is not None.
    :param pending: the deferred statements, which are sent together with the next statement.
    :param may_release: True if the server certainly has every savepoint that is not in ``pending``,
        so that its RELEASE cannot fail.
    """
    match = _DJANGO.match(sql.strip())
    assert match is not None
    what, statement = SavepointStatement(match[1]), sql.strip().encode()
    if what is SavepointStatement.SAVEPOINT:
        pending.append(statement)
        return True
    created = b"SAVEPOINT " + match[2].encode()
    if created in pending:
        # The SAVEPOINT was not sent yet. So do not send this RELEASE or ROLLBACK TO. Instead,
        # remove the SAVEPOINT and the later savepoints, which are nested in it. For ROLLBACK TO,
        # keep the SAVEPOINT itself, because the savepoint goes on.
        keep = what is SavepointStatement.ROLLBACK_TO
        del pending[pending.index(created) + keep :]
        return True
    if what is SavepointStatement.RELEASE and may_release:
        pending.append(statement)
        return True
    return False
