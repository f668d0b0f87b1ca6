"""Test databases of a group: Django's test runners call these methods.

What they do is in ``sharded_orm.testing``, which is imported when tests run only: the app
says how to reach it (:func:`provide_test_databases`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from django.core.exceptions import ImproperlyConfigured
from django.db.backends.base.creation import BaseDatabaseCreation

from sharded_orm.topology.model import Shard


class TestDatabases(Protocol):
    """The test databases of one group in this process."""

    #: Aliases of shards that a test may have written to.
    touched: set[str]

    def create(self, connection: Any, *, verbosity: int, keep: bool) -> str:
        """Make the template, use test schemas from now on; the template's name."""

    def enter_worker(self, connection: Any, worker: str) -> None:
        """Give this process, a parallel worker, shards of its own."""

    def drop_worker(self, worker: str) -> None:
        """Drop the shards of a parallel worker."""

    def destroy(self, connection: Any, *, keep: bool) -> None:
        """Drop everything unless ``keep``, and use the configured schemas again."""

    def ensure(self, shards: Iterable[Shard]) -> None:
        """Make each shard's database exist, as a clone of the template. Thread-safe."""

    def restore_touched(self) -> None:
        """Bring every shard that was used back to the template's rows."""

    def reset_sequences(self) -> None:
        """Let each table's own ids begin anew."""


#: Group name -> its test databases, while tests run.
test_databases: dict[str, TestDatabases] = {}


def prepare_shards(group: str, shards: Iterable[Shard]) -> None:
    """Call before SQL that names schemas of ``shards`` without using their wrappers.

    Free outside of test runs; there, shards are made at their first use.
    """
    tests = test_databases.get(group)
    if tests is not None:
        tests.ensure(shards)


# From the wrapper of a group to its test databases, which are made at their first use.
_databases_of: Callable[[Any], TestDatabases] | None = None


def provide_test_databases(databases_of: Callable[[Any], TestDatabases]) -> None:
    """Reach the test databases of a group's wrapper in this way."""
    global _databases_of
    _databases_of = databases_of


class GroupCreation(BaseDatabaseCreation):
    """The ``creation`` of a group's alias. Its test database is all of the group's shards."""

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
        """Migrate the template; the shards follow when they are used.

        Leftovers of an earlier run are dropped without a question: their names are
        those of test schemas of this group.
        """
        self._say(verbosity, keepdb, "Creating", "Using existing")
        return self._tests.create(self.connection, verbosity=verbosity, keep=keepdb)

    def clone_test_db(
        self, suffix: str, verbosity: int = 1, autoclobber: bool = False, keepdb: bool = False
    ) -> None:
        # Workers share the template. Only leftovers are in their way.
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
        # serialized_rollback promises the rows that migrations made. Flushing the
        # group restores them, so there is nothing to keep.
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
