"""Savepoints that the server need not know of yet."""

from __future__ import annotations

from sharded_orm.backends.mysql.statement_kind import StatementKind, savepoint_name


def defer(pending: list[bytes], kind: StatementKind, sql: str, *, surely_there: bool) -> bool:
    """Handle a savepoint statement of Django's on the client; False if the server must see it.

    Statements in ``pending`` go to the server together with the next one that is no
    savepoint statement. A savepoint that was created and ended before then costs nothing.

    :param surely_there: nothing in this transaction can have removed a savepoint behind
        our back, as a deadlock or DDL does; releasing one cannot fail then.
    """
    statement = sql.encode()
    if kind is StatementKind.SAVEPOINT:
        pending.append(statement)
        return True
    created = b"SAVEPOINT " + savepoint_name(sql).encode()
    if created in pending:
        # What came after it belonged to it. ROLLBACK TO keeps the savepoint itself.
        del pending[pending.index(created) + (kind is StatementKind.ROLLBACK_TO) :]
        return True
    if kind is StatementKind.RELEASE and surely_there:
        pending.append(statement)
        return True
    return False
