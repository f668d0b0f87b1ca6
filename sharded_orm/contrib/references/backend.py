"""Tells whether the global database's backend reports writes, and whether a transaction is open."""

from __future__ import annotations

from typing import Any

from django.db import DEFAULT_DB_ALIAS, connections

from sharded_orm.backends.write_hooks.commit import CommitHookMixin
from sharded_orm.conf.nodes import backend_for
from sharded_orm.contrib.references.exceptions import InvalidReferenceModel


def problem_of_backend() -> str | None:
    """Return a sentence that says why copies cannot follow the global database; None if they can.

    They can if its backend reports writes and commits.
    """
    connection = connections[DEFAULT_DB_ALIAS]
    engine = connection.settings_dict["ENGINE"]
    # Django uses the dummy backend if no database is configured. Then nothing is written.
    if isinstance(connection, CommitHookMixin) or engine == "django.db.backends.dummy":
        return None
    return (
        f"The database {DEFAULT_DB_ALIAS!r} has the ENGINE {engine!r}, which does not say what is about to be"
        f" committed, so copies on the shards could not follow. Use {backend_for(engine)}, which behaves as"
        " Django's own."
    )


def require_hooks() -> None:
    """Raise an error if the global database's backend does not report writes and commits.

    :raises InvalidReferenceModel: the backend does not report them.
    """
    if (problem := problem_of_backend()) is not None:
        raise InvalidReferenceModel(problem)


def in_test_case() -> bool:
    """Return whether this thread runs a test of a ``TestCase`` that may use the global database.

    Around each test, ``TestCase`` opens a transaction on each of the databases that the test may
    use.
    """
    connection: Any = connections[DEFAULT_DB_ALIAS]
    return any(block._from_testcase for block in connection.atomic_blocks)


def in_transaction() -> bool:
    """Return whether this thread has an open transaction on the global database.

    The transaction that a ``TestCase`` opens around each test does not count.
    """
    connection = connections[DEFAULT_DB_ALIAS]
    is_open = connection.in_atomic_block or not connection.get_autocommit()
    return is_open and not in_test_case()
