"""Django's own test suite on our MySQL backend and on the stock one, compared.

``python -m tests.django_suite`` takes ``tests/`` from the source distribution of the
Django that is installed, runs ``runtests.py`` twice with two schemas of one server as
``default`` and ``other`` (engine ``django.db.backends.mysql``, then
``sharded_orm.backends.mysql``) and compares the outcomes test by test. A test that passes
on stock has to pass on ours, or to be in ``exceptions.toml`` with a decision.

Limits of the comparison:

- Tests that look at ``connection.vendor`` run as for any MySQL backend. Our backend takes over
  some parts of the stock backend unchanged (``DatabaseClient``, the ``DatabaseCreation`` that
  ``backends.mysql.test_creation`` imports); their tests test Django twice.
- Tests that write settings of their own (``admin_scripts``) use SQLite on both sides. So do the
  tests that ``runtests.py`` skips because a package, a browser or another server is missing.
- The aliases are explicit ones; shards, groups and routing have tests of their own.
- One thread does most of the work, so the pool hands out the same session again and again.
  With ``--scramble`` our pool opens several and leases one of them at random.
"""
