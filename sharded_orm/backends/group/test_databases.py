"""The ``creation`` of a group's alias. Django's test runners call its methods.

The work is done in ``sharded_orm.testing``, which must be imported only when tests run. So this module
does not import it: the app provides a function instead (:func:`provide_test_databases`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from django.core.exceptions import ImproperlyConfigured
from django.db.backends.base.creation import BaseDatabaseCreation

from sharded_orm.topology.model import Shard


class TestDatabases(Protocol):
    """The test databases of one group in this process."""

    #: The aliases of shards that tests may have written to since the last restore.
    touched: set[str]

    def create(self, connection: Any, *, verbosity: int, keep: bool) -> str:
        """Create the template and use test schemas from now on. Return the name of its schema.

        The template is the only schema that is migrated; test shards are clones of it.

        :param connection: the connection object of the group's alias.
        :param keep: whether to use an existing template and shards (``--keepdb``).
        """

    def enter_worker(self, connection: Any, worker: str) -> None:
        """Use separate test shards in this process, which is one worker of a parallel test run.

        :param connection: the connection object of the group's alias.
        :param worker: number of the worker.
        """

    def drop_worker(self, worker: str) -> None:
        """Drop the test shards of a worker of a parallel test run.

        :param worker: number of the worker.
        """

    def destroy(self, connection: Any, *, keep: bool) -> None:
        """Use the configured schemas again. Drop all test schemas first, unless ``keep`` is true.

        :param connection: the connection object of the group's alias.
        """

    def ensure(self, shards: Iterable[Shard]) -> None:
        """Create those databases of ``shards`` that do not exist, as clones of the template.

        The template is the schema that was migrated. Thread-safe.
        """

    def restore_touched(self) -> None:
        """Replace the rows of each shard in :attr:`touched` by the rows of the template."""

    def reset_sequences(self) -> None:
        """Reset the counters of all tables with AUTO_INCREMENT or the like."""


#: The test databases of each group, by the group's name. Empty unless tests run.
test_databases: dict[str, TestDatabases] = {}


def prepare_shards(group: str, shards: Iterable[Shard]) -> None:
    """Create those test databases of ``shards`` that do not exist. Does nothing outside of test runs.

    Must be called before SQL that names the shards' schemas but does not use the shards' connection
    objects, which call this function themselves.
    """
    tests = test_databases.get(group)
    if tests is not None:
        tests.ensure(shards)


# The function that returns the test databases of a group, given the connection object of the group's
# alias. None without the app.
_databases_of: Callable[[Any], TestDatabases] | None = None


def provide_test_databases(databases_of: Callable[[Any], TestDatabases]) -> None:
    """Set the function that returns a group's test databases, given the group's connection object."""
    global _databases_of
    _databases_of = databases_of


class GroupCreation(BaseDatabaseCreation):
    """Creates and destroys the test database of a group's alias: all shards of the group."""

    @property
    def _tests(self) -> TestDatabases:
        if _databases_of is None:
            raise ImproperlyConfigured(
                "Shards have no test databases without the app: add 'sharded_orm' to INSTALLED_APPS."
            )
        return _databases_of(self.connection)

    def _say(self, verbosity: int, keepdb: bool, action: str, kept: str) -> None:
        if verbosity >= 1:
            alias = self.connection.alias
            self.log(f"{kept if keepdb else action} test databases for shard group {alias!r}...")

    def create_test_db(
        self,
        verbosity: int = 1,
        autoclobber: bool = False,
        serialize: bool = True,
        keepdb: bool = False,
    ) -> str:
        """Create and migrate the template. Each test shard is cloned from it at the shard's first use.

        Schemas that an earlier test run left behind are dropped without asking, as only test schemas
        of this group have such names.
        """
        self._say(verbosity, keepdb, "Creating", "Using existing")
        return self._tests.create(self.connection, verbosity=verbosity, keep=keepdb)

    def clone_test_db(
        self, suffix: str, verbosity: int = 1, autoclobber: bool = False, keepdb: bool = False
    ) -> None:
        # There is nothing to clone, as workers share the template. But an earlier test run may have left
        # shards of this worker behind.
        self._say(verbosity, keepdb, "Cloning", "Using existing clones of")
        if not keepdb:
            self._tests.drop_worker(suffix)

    def setup_worker_connection(self, _worker_id: int) -> None:
        self._tests.enter_worker(self.connection, str(_worker_id))

    def destroy_test_db(
        self,
        old_database_name: str | None = None,
        verbosity: int = 1,
        keepdb: bool = False,
        suffix: str | None = None,
    ) -> None:
        self._say(verbosity, keepdb, "Destroying", "Preserving")
        if suffix is None:
            self._tests.destroy(self.connection, keep=keepdb)
        elif not keepdb:
            self._tests.drop_worker(suffix)

    def serialize_db_to_string(self) -> str:
        # serialized_rollback is there to restore the rows that migrations wrote. A flush of the group puts them back
        # well, so there is nothing to serialize.
        return ""

    def deserialize_db_from_string(self, data: str) -> None:
        pass

    def get_test_db_clone_settings(self, suffix: str) -> dict[str, Any]:
        return self.connection.settings_dict

    def set_as_test_mirror(self, primary_settings_dict: Any) -> None:
        raise ImproperlyConfigured(
            f"The group {self.connection.alias!r} cannot be a TEST['MIRROR']: in tests, shards have"
            " no replicas and reads go to the primary."
        )

    def test_db_signature(self) -> tuple[str, str, str, str]:
        # A signature that no other alias has: Django gives aliases with equal signatures one test database.
        return ("", "", "sharded_orm", self.connection.alias)
