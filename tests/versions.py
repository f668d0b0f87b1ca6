"""What tests have to know of the version of Django. No other test compares a version."""

from __future__ import annotations

import django

DJANGO_RELEASE = django.get_version()
#: Without the number of the release, such as "6.1".
DJANGO_VERSION = ".".join(map(str, django.VERSION[:2]))
#: Whether querysets have a fetch mode.
HAS_FETCH_MODES = django.VERSION >= (6, 1)
#: Whether ``bulk_create()`` of one batch is a single statement, without a transaction around it.
INSERTS_A_BATCH_ALONE = django.VERSION >= (6, 0)
#: The deprecated name of the function is an error in these tests.
SAVEPOINT = "savepoint_create" if django.VERSION >= (6, 1) else "savepoint"
#: Attributes of queries that only a later version has.
NOT_YET_IN_QUERIES = frozenset() if django.VERSION >= (6, 0) else frozenset({"contains_subquery"})
#: Whether ``save()`` sets fields that the database has computed.
UPDATES_RETURN_FIELDS = django.VERSION >= (6, 0)
#: Whether there is ``django.tasks``.
HAS_TASKS = django.VERSION >= (6, 0)
#: Whether the admin has actions on the page of one row.
HAS_ACTIONS_OF_A_ROW = django.VERSION >= (6, 1)
#: Whether a foreign key can leave its ``on_delete`` to the database.
HAS_DATABASE_ON_DELETE = django.VERSION >= (6, 1)
