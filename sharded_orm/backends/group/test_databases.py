"""Test databases of shard groups: the class ``GroupCreation``, which is the ``creation`` of a
group's alias. Django's test runners call its methods.

``sharded_orm.testing`` does the work, and must be imported only when tests run. So this module does
not import it. Instead, the app passes a function to :func:`provide_test_databases`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from django.core.exceptions import ImproperlyConfigured
from django.db.backends.base.creation import BaseDatabaseCreation

from sharded_orm.topology.model import Shard


class TestDatabases(Protocol):
    """The test databases of one shard group in this process. A class in ``sharded_orm.testing``
    implements this.
    """

    #: Aliases of the shards on which tests may have changed rows since the last restore_touched().
    touched: set[str]

    def create(self, connection: Any, *, verbosity: int, keep: bool) -> str:
        """Create and migrate the template, the schema from which test shards are cloned. From now
        on, use test schemas in this process. Return the name of the template's schema.

        Only the template is migrated. A test shard gets copies of its tables when a test first uses
        the shard.

        :param connection: the connection object of the group's alias.
        :param keep: whether to use an existing template and existing test shards (``--keepdb``);
            otherwise they are dropped first.
        """

    def enter_worker(self, connection: Any, worker: str) -> None:
        """Give this process, one of the workers of a parallel test run, test shards of its own, so
        that the workers do not disturb each other.

        :param connection: the connection object of the group's alias.
        :param worker: the number of the worker.
        """

    def drop_worker(self, worker: str) -> None:
        """Drop the test shards of one worker process of a parallel test run.

        :param worker: number of the worker process.
        """

    def destroy(self, connection: Any, *, keep: bool) -> None:
        """End the test run in this process: use the schemas that the settings name again.

        :param connection: the connection object of the group's alias.
        :param keep: whether to keep the test schemas (``--keepdb``); otherwise they are dropped.
        """

    def ensure(self, shards: Iterable[Shard]) -> None:
        """Create the test databases of ``shards`` that do not exist yet, as clones of the template
        (the migrated schema). Thread-safe.
        """

    def restore_touched(self) -> None:
        """Replace the rows of each shard in :attr:`touched` by the rows of the template (the
        migrated schema), so that the next test finds the same rows as the first one.
        """

    def reset_sequences(self) -> None:
        """Reset the counters of generated ids (such as AUTO_INCREMENT) on the shards that tests
        have used.
        """


#: The test databases of each group, by the group's name. Empty outside of test runs.
test_databases: dict[str, TestDatabases] = {}


def prepare_shards(group: str, shards: Iterable[Shard]) -> None:
    """Create the missing test databases of ``shards``. Does nothing outside of test runs.

    A shard's connection object calls this function when it connects. So call it elsewhere only
    before a statement that uses the schema of a shard over another connection.
    """
    tests = test_databases.get(group)
    if tests is not None:
        tests.ensure(shards)


# A function that returns the test databases of a group. Its argument is the connection object of
# the group's alias. The app ``sharded_orm`` sets it when Django loads the app; before that, it is
# None.
_databases_of: Callable[[Any], TestDatabases] | None = None


def provide_test_databases(databases_of: Callable[[Any], TestDatabases]) -> None:
    """Set the function that returns a group's test databases, given the group's connection object."""
    global _databases_of
    _databases_of = databases_of


class GroupCreation(BaseDatabaseCreation):
    """Creates and destroys the test databases of a group's shards.

    Django's test runners call the methods for the group's alias, as for the alias of one database.
    """

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
        serialize: Any = True,
        keepdb: bool = False,
    ) -> str:
        """Create and migrate the template, the schema from which test shards are cloned at their first
        use.

        Schemas that an earlier test run has left are dropped without a question, because their names
        show that they are test schemas of this group.
        """
        self._say(verbosity, keepdb, "Creating", "Using existing")
        return self._tests.create(self.connection, verbosity=verbosity, keep=keepdb)

    def clone_test_db(
        self, suffix: str, verbosity: int = 1, autoclobber: bool = False, keepdb: bool = False
    ) -> None:
        # The template (the schema from which test shards are cloned) is common to all workers of a
        # parallel run. So nothing has to be cloned here. But an earlier test run may have left
        # shards of this worker: drop these.
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
        # For test cases with serialized_rollback, Django serializes the rows that migrations wrote,
        # and restores them after a flush. The flush of a group restores these rows itself, so
        # serialize nothing.
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
        # Django gives one common test database to all aliases with equal signatures. So return a
        # signature that no other alias has.
        return ("", "", "sharded_orm", self.connection.alias)
