"""Django's own test suite on our backends and on the stock ones, compared.

``python -m tests.django_suite`` takes ``tests/`` from the source distribution of the
Django that is installed and compares two sides test by test: the stock backend and ours, with
two databases as ``default`` and ``other``. With ``--backend mysql`` (default) and ``--backend
postgresql`` they are databases of one server, with ``--backend sqlite`` in memory. A test that passes on stock has to pass on ours,
or to be in ``exceptions.toml`` with a decision.

``runtests.py`` runs once for each side and chunk of labels. With ``--keep FOLDER`` a second run
takes over the chunks that have come to their end, so that a run that was interrupted goes on.
A result counts for the versions of Django and Python, the backend, the side, the labels and the
options that it was made with, and on our side for the code of the package: after a change of the
code our side runs again, and the stock side does not.

Limits of the comparison:

- Tests that look at ``connection.vendor`` run as for any backend of this vendor. Our backends
  take over some parts of the stock ones unchanged (``DatabaseClient``, the ``DatabaseCreation``
  that ``backends.mysql.test_creation`` imports); their tests test Django twice.
- Tests of the test runner that start processes with databases of their own use stock SQLite on
  both sides. The tests that ``runtests.py`` skips because a package, a browser or another server
  is missing are skipped on both.
- The aliases are explicit ones; shards, groups and routing have tests of their own.
- One thread does most of the work, so the pool hands out the same session again and again.
  With ``--scramble`` our pool (MySQL, PostgreSQL) opens several and leases one of them at random.
- With ``--pgbouncer`` our side is behind a PgBouncer, and the stock side is not: it does not work
  there. What is refused behind a pooler is in ``exceptions_pgbouncer.toml``, and what plans cannot hide
  in ``exceptions_plans.toml``.
"""
