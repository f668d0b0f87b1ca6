"""The table of commit decisions, for sites that use blocks with ``two_phase=True``.

To use it, add ``"sharded_orm.contrib.two_phase"`` to ``INSTALLED_APPS``, and run ``manage.py
migrate_shards``.
"""
