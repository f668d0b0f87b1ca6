"""Django's class that creates test databases, for aliases that are not shards."""

from __future__ import annotations

from django.db.backends.postgresql import creation as stock

from sharded_orm.backends.creation import IsolatedCacheCreation


class DatabaseCreation(IsolatedCacheCreation, stock.DatabaseCreation):
    def _destroy_test_db(self, test_database_name: str, verbosity: int) -> None:
        # Overrides the method of Django's PostgreSQL backend, because the server refuses to drop a
        # database with open sessions. close_pool() closes the sessions of this process. A pooler
        # keeps its own sessions open, so FORCE makes the server end these.
        self.connection.close_pool()
        with self.connection._nodb_cursor() as cursor:
            force = " WITH (FORCE)" if cursor.connection.has_pooler else ""
            name = self.connection.ops.quote_name(test_database_name)
            cursor.execute(f"DROP DATABASE {name}{force}")
