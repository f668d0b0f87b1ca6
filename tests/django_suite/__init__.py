"""The yardstick: Django's own test suite on our MySQL backend and on the stock one.

``python -m tests.django_suite`` takes ``tests/`` from the source distribution of the
Django that is installed, runs ``runtests.py`` twice with two schemas of one server as
``default`` and ``other`` (engine ``django.db.backends.mysql``, then
``sharded_orm.backends.mysql``) and compares the outcomes test by test. A test that passes
on stock has to pass on ours, or to be in ``exceptions.toml`` with a decision.

What the comparison cannot show:

- Tests that look at ``connection.vendor`` run as for any MySQL backend. Tests of parts that
  the stock backend has and ours takes over unchanged (``DatabaseClient``, the
  ``DatabaseCreation`` that ``backends.mysql.test_creation`` imports) test Django twice.
- Tests that write settings of their own (``admin_scripts``) use SQLite on both sides, and so
  does whatever ``runtests.py`` skips for want of a package, a browser or another server.
- The aliases are explicit ones; shards, groups and routing have tests of their own.
- One thread does most of the work, so the pool hands out the same session again and again.
  ``--scramble`` makes our pool open several and lease one of them at random.
"""
