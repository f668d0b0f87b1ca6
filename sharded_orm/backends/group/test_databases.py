"""The ``creation`` of a group's alias, whose methods Django's test runners call.

The work is done in ``sharded_orm.testing``, which is imported only when tests run: the app
provides a function that reaches it (:func:`provide_test_databases`).
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
        """Create the template and use test schemas from now on; return the template's name.

        The template is the schema that is migrated; the shards are clones of it.
        """

    def enter_worker(self, connection: Any, worker: str) -> None:
        """Use shards of its own in this process, which is a parallel worker."""

    def drop_worker(self, worker: str) -> None:
        """Drop the shards of a parallel worker."""

    def destroy(self, connection: Any, *, keep: bool) -> None:
        """Drop everything unless ``keep``, and use the configured schemas again."""

    def ensure(self, shards: Iterable[Shard]) -> None:
        """Create the databases of ``shards`` that do not exist, as clones of the template.

        Thread-safe.
        """

    def restore_touched(self) -> None:
        """Replace the rows of every touched shard by the template's."""

    def reset_sequences(self) -> None:
        """Restart the ids that tables count themselves."""


#: Group name -> its test databases, while tests run.
test_databases: dict[str, TestDatabases] = {}


def prepare_shards(group: str, shards: Iterable[Shard]) -> None:
    """Create test shards that do not exist yet; does nothing outside of test runs.

    To be called before SQL that names their schemas without using their connection objects.
    """
    tests = test_databases.get(group)
    if tests is not None:
        tests.ensure(shards)


# Returns the test databases of a group's connection object, and creates them at first use.
_databases_of: Callable[[Any], TestDatabases] | None = None


def provide_test_databases(databases_of: Callable[[Any], TestDatabases]) -> None:
    """Set the function that returns the test databases of a group's connection object."""
    global _databases_of
    _databases_of = databases_of


class GroupCreation(BaseDatabaseCreation):
    """The test database of a group's alias is all shards of the group."""

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
        """Migrate the template; each shard is created at its first use.

        Schemas left by an earlier run are dropped without a question: only test schemas of this
        group have such names.
        """
        self._say(verbosity, keepdb, "Creating", "Using existing")
        return self._tests.create(self.connection, verbosity=verbosity, keep=keepdb)

    def clone_test_db(
        self, suffix: str, verbosity: int = 1, autoclobber: bool = False, keepdb: bool = False
    ) -> None:
        # Workers share the template, so there is nothing to clone; an earlier run may have left shards.
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
        # serialized_rollback promises the rows that migrations wrote. Flushing the group restores
        # them, so there is nothing to serialize.
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
        # No other alias shares its test databases.
        return ("", "", "sharded_orm", self.connection.alias)
