"""The test databases of a shard group: a template schema, and test shards that are clones of it.

A test shard is created at its first use. Django's test runners call this module through the
``creation`` of the group's alias. While the test databases exist, the topology in this process has
the test schemas instead of the configured ones. So no look-up of a shard leads to real data.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from django.apps import apps
from django.conf import settings
from django.core.management import call_command
from django.core.management.color import no_style
from django.core.management.sql import sql_flush
from django.core.signals import setting_changed
from django.db import connections

from sharded_orm import database_settings, runtime
from sharded_orm.autonomous_connections import AutonomousConnections
from sharded_orm.backends.features import features_of
from sharded_orm.backends.group.test_databases import test_databases
from sharded_orm.conf import SETTING
from sharded_orm.exceptions import ShardDatabaseMissing
from sharded_orm.testing import cache_isolation
from sharded_orm.testing.clones import Cloner
from sharded_orm.testing.clones_sqlite3 import SQLiteCloner
from sharded_orm.testing.names import TestNames, with_test_group, without_test_group
from sharded_orm.topology.model import Shard, ShardGroup

# The key in the settings of the group's alias under which the names of the test schemas are stored.
# A worker process that was spawned, and not forked, reads the names there.
_SETTING = "TEST_SHARDS"


class GroupTestDatabases:
    """The test databases of one shard group in this process.

    Methods that tests use, such as :meth:`ensure`, are thread-safe. The methods for set-up and
    tear-down are called only in the thread of the test runner.
    """

    _instances: dict[str, GroupTestDatabases] = {}

    def __init__(self, configured: ShardGroup, cloner: Cloner) -> None:
        self.configured = configured
        self.names = TestNames(configured.name)
        self.keep = False
        # Aliases of shards that tests may have written to since the last restore. The connection
        # objects of the shards refer to this set object, so never assign another set here.
        self.touched: set[str] = set()
        self._cloner = cloner
        self._loaded = False
        # Aliases of the test shards that exist. An alias is added only after its shard has all
        # tables of the template (the migrated schema). The set is changed only while the lock is
        # held.
        self._ready: set[str] = set()
        self._lock = threading.RLock()

    @classmethod
    def of(cls, connection: Any) -> GroupTestDatabases:
        """Return the ``GroupTestDatabases`` of a group. The first call for a group creates it.

        :param connection: the connection object of the group's alias.
        """
        name = connection.settings_dict["GROUP"]
        if name not in cls._instances:
            cloner = _cloner(connection)
            cls._instances[name] = cls(runtime.config().topology.groups[name], cloner)
        return cls._instances[name]

    # ##### Set-up and tear-down, in the thread of the test runner #####

    def create(self, connection: Any, *, verbosity: int, keep: bool) -> str:
        """Create the template, and make the group use test schemas in this process.

        The template is the schema that is migrated. Test shards are created as clones of the
        template. Return the name of the template.

        :param connection: the connection object of the group's alias.
        :param keep: whether to use an existing template and existing test shards (``--keepdb``).
        """
        self.keep = keep
        cache_isolation.isolate(self.configured.name)
        # Close the sessions with the real ticket servers. A test case of Django forbids new
        # connections to databases that it does not name, but it cannot forbid the use of sessions
        # that are open already.
        runtime.tickets().close()
        are_files = isinstance(self._cloner, SQLiteCloner)
        self.names = TestNames(
            self.configured.name,
            base=connection.settings_dict["TEST"]["NAME"] or "",
            folder=_temporary_folder() if are_files and not keep else "",
        )
        connection.settings_dict[_SETTING] = {"names": self.names.to_settings(), "keep": keep}
        self._switch(connection)
        template = self.names.template(self.configured)
        if not keep:
            self._cloner.drop(self._shards())
        self._cloner.create_template(template, keep=keep)
        self._migrate(connection, verbosity)
        self._load_template()
        connection.ensure_connection()
        return template.schema

    def _migrate(self, connection: Any, verbosity: int) -> None:
        alias = self.configured.name + database_settings.TEMPLATE_SUFFIX
        try:
            with _migrations_disabled(connection.settings_dict["TEST"]["MIGRATE"] is False):
                call_command(
                    "migrate",
                    verbosity=max(verbosity - 1, 0),
                    interactive=False,
                    database=alias,
                    run_syncdb=True,
                )
        finally:
            connections[alias].close()
            del connections[alias]

    def enter_worker(self, connection: Any, worker: str) -> None:
        """Use separate test shards in this process, which is one worker of a parallel test run.

        :param connection: the connection object of the group's alias.
        :param worker: number of the worker, which becomes part of the shards' names.
        """
        cache_isolation.isolate_worker(self.configured.name)
        # Read the names of the test schemas from the settings. The parent process has stored them
        # there, and a spawned worker process has a copy of the parent's settings.
        setting = connection.settings_dict[_SETTING]
        self.names, self.keep = TestNames(**setting["names"]).for_worker(worker), setting["keep"]
        self._switch(connection)

    def drop_worker(self, worker: str) -> None:
        self._cloner.drop(self._shards(self.names.for_worker(worker)))

    def destroy(self, connection: Any, *, keep: bool) -> None:
        """Restore the configured topology at the end of the test run.

        Drop all test schemas first, unless ``keep`` is true.

        :param connection: the connection object of the group's alias.
        """
        self._close_wrappers(connection)
        if not keep:
            self._cloner.drop(self._shards())
            self._cloner.drop([self.names.template(self.configured)])
            if self.names.folder:
                shutil.rmtree(self.names.folder, ignore_errors=True)
        with self._lock:
            self._ready.clear()
            self.touched.clear()
            self._loaded = False
        test_databases.pop(self.configured.name, None)
        setting_changed.disconnect(self._settings_changed)
        connection.settings_dict.pop(_SETTING, None)
        runtime.swap(without_test_group(runtime.topology(), self.configured))
        cache_isolation.release(self.configured.name)

    def _switch(self, connection: Any) -> None:
        self._close_wrappers(connection)
        AutonomousConnections.close_all()
        with self._lock:
            self._ready.clear()
            self.touched.clear()
        runtime.swap(with_test_group(runtime.topology(), self.configured, self.names))
        test_databases[self.configured.name] = self
        # Django calls receivers of a signal in the order in which they were connected. The receiver
        # of sharded_orm.apps was connected earlier, and drops the old configuration. So
        # _settings_changed() is called later, and reads the new configuration.
        setting_changed.connect(self._settings_changed)
        # The group's connection object keeps a limited number of connection objects of shards, and
        # drops others. It might drop one that a test has patched, so set no limit while tests run.
        # The group's connection objects that other threads create from now on have no limit anyway.
        connection.shards.limit = None

    def _settings_changed(self, *, setting: str, **kwargs: Any) -> None:
        """Switch to test schemas again, because ``override_settings(SHARDED_ORM=…)`` has reloaded
        the configured topology.

        Receives Django's signal ``setting_changed``.
        """
        if setting == SETTING and test_databases.get(self.configured.name) is self:
            configured = runtime.config().topology.groups.get(self.configured.name)
            if configured is not None:
                self.configured = configured
                runtime.swap(with_test_group(runtime.topology(), configured, self.names))

    def _close_wrappers(self, connection: Any) -> None:
        """Close and drop this thread's connection objects of the group's shards.

        Their settings name schemas that will not be used any more.
        """
        connection.close()
        for wrapper in connection.shards:
            connection.shards.forget(wrapper)

    def _shards(self, names: TestNames | None = None) -> Iterator[Shard]:
        return (names or self.names).renamed(self.configured).shards()

    # ##### While tests run, in any thread #####

    def ensure(self, shards: Iterable[Shard]) -> None:
        """Create the missing databases of ``shards``, as clones of the template.

        :raises ShardDatabaseMissing: one of ``shards`` was looked up before the test databases were
            created, so it has the name of a real schema.
        """
        group = runtime.group(self.configured.name)
        missing = []
        for shard in shards:
            if shard.schema != group.schema_name(shard.number):
                raise _outdated(shard)
            if shard.alias not in self._ready:
                missing.append(shard)
        if missing:
            with self._lock, self._cloner.batch():
                self._load_template()
                for shard in missing:
                    if shard.alias not in self._ready:
                        self._cloner.clone(shard, keep=self.keep)
                        self._ready.add(shard.alias)

    def _load_template(self) -> None:
        if not self._loaded:
            self._cloner.load_template(self.names.template(self.configured))
            self._loaded = True

    def restore_touched(self) -> None:
        """Replace the rows of each touched shard by the rows of the template, the migrated schema.

        Touched shards are those that tests may have written to; see :attr:`touched`. Django's flush
        calls this method after each test of a ``TransactionTestCase``. So the rows that migrations
        wrote are there again, even without ``serialized_rollback``.

        If a shard has an open transaction, its rows cannot be replaced, because another connection
        would have to wait for the transaction. So the rows are deleted inside the transaction, and
        the shard still counts as touched.
        """
        forget = getattr(runtime.strategy(self.configured.name), "forget", None)
        if forget is not None:
            # Django's flush also empties the directory, the table with the shard of each key. So
            # make the routing strategy forget the shards that it has read there.
            forget()
        cache_isolation.renew()
        AutonomousConnections.close_all()
        with self._lock, self._cloner.batch():
            touched = sorted(self.touched)
            self.touched.clear()
            for alias in touched:
                wrapper: Any = connections[alias]
                if wrapper.get_autocommit():
                    wrapper.close()
                    self._cloner.restore(wrapper.shard)
                else:
                    self.touched.add(alias)
                    _flush(wrapper)

    def reset_sequences(self) -> None:
        """Reset the id counters of all tables of the test shards, so that ids begin anew.

        Called for a test case with ``reset_sequences = True``.
        """
        group = runtime.group(self.configured.name)
        with self._lock, self._cloner.batch():
            numbers = (int(alias.rpartition("_")[2]) for alias in sorted(self._ready))
            self._cloner.reset_sequences(group.shard(number) for number in numbers)


def _flush(wrapper: Any) -> None:
    """Delete all rows of a shard inside its open transaction, with the statements of Django's flush.

    :param wrapper: the shard's connection object.
    """
    wrapper.ops.execute_sql_flush(sql_flush(no_style(), wrapper, reset_sequences=False))


def _cloner(connection: Any) -> Cloner:
    features = features_of(connection)
    if features.shards_are_files:
        return SQLiteCloner()
    # These import the drivers.
    if features.shards_share_database:
        from sharded_orm.testing.clones_postgresql import PostgreSQLCloner

        return PostgreSQLCloner()
    from sharded_orm.testing.clones_mysql import MySQLCloner

    return MySQLCloner()


def _outdated(shard: Shard) -> ShardDatabaseMissing:
    return ShardDatabaseMissing(
        f"This connection object or Shard of {shard.alias!r} is older than the test databases: it"
        f" names {shard.schema!r}. Look it up inside the test, not when a module is imported."
    )


def _temporary_folder() -> str:
    folder = tempfile.mkdtemp(prefix="sharded_orm_tests_")
    owner = os.getpid()

    def remove() -> None:
        # This function is called when the process exits, so the folder is removed even if the test
        # run was interrupted. A forked worker process must not remove the folder, which belongs to
        # its parent process.
        if os.getpid() == owner:
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder


@contextmanager
def _migrations_disabled(disabled: bool) -> Iterator[None]:
    """Context manager that disables migrations in its block, like Django's ``TEST = {"MIGRATE":
    False}``.

    :param disabled: whether to disable migrations; if False, the context manager does nothing.
    """
    if not disabled:
        yield
        return
    modules = settings.MIGRATION_MODULES
    settings.MIGRATION_MODULES = {app.label: None for app in apps.get_app_configs()}
    try:
        yield
    finally:
        settings.MIGRATION_MODULES = modules
