"""Replace some errors of the server by other exception classes, for callers of a cursor."""

from __future__ import annotations

from typing import Any

from django.db import IntegrityError
from MySQLdb import OperationalError

from sharded_orm.backends.missing_parts import creation_remedy
from sharded_orm.exceptions import ShardDatabaseMissing

# Codes of errors that the driver raises as OperationalError, but Django as IntegrityError. The same
# as in django.db.backends.mysql.base.CursorWrapper.codes_for_integrityerror.
_INTEGRITY_ERRORS = frozenset([1048, 1690, 3819, 4025])
_UNKNOWN_DATABASE = 1049


def error_for_callers(exc: OperationalError, connection: Any) -> Exception | None:
    """Return the error to raise in place of ``exc``, such as ``ShardDatabaseMissing``. Return
    None if ``exc`` itself is to be raised.

    :param connection: the :class:`~sharded_orm.backends.mysql.connection.VirtualConnection`.
    """
    if (error := integrity_error(exc)) is not None:
        return error
    number = exc.args[0] if exc.args else None
    schema = connection.schema
    if number == _UNKNOWN_DATABASE and schema and f"'{schema}'" in str(exc.args[-1]):
        # Keep the server's error number as the first argument, because programs look for it there.
        return ShardDatabaseMissing(
            number,
            f"Alias {connection.alias!r} has no schema {schema!r} on {connection.pool.name!r}."
            f" {creation_remedy(connection.alias)}, or correct the topology.",
        )
    return None


def integrity_error(exc: BaseException) -> IntegrityError | None:
    """Return the ``IntegrityError`` that Django raises in place of ``exc``. Return None if Django
    raises ``exc`` itself.
    """
    if isinstance(exc, OperationalError) and exc.args and exc.args[0] in _INTEGRITY_ERRORS:
        return IntegrityError(*exc.args)
    return None
