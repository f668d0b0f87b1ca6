"""Django's ``dbshell`` for a shard: runs ``psql`` with the search path of the shard's schema."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from django.db.backends.postgresql import client as stock

from sharded_orm.backends.postgresql.search_path import search_path_option


class DatabaseClient(stock.DatabaseClient):
    @classmethod
    def settings_to_cmd_args_env(
        cls, settings_dict: dict[str, Any], parameters: Iterable[str]
    ) -> tuple[list[str], dict[str, str] | None]:
        arguments, environment = super().settings_to_cmd_args_env(settings_dict, parameters)
        schema = settings_dict.get("SCHEMA")
        if schema is None:
            return arguments, environment
        options = f"{os.environ.get('PGOPTIONS', '')} {search_path_option(schema)}".strip()
        return arguments, {**(environment or {}), "PGOPTIONS": options}

    def runshell(self, parameters: Iterable[str]) -> None:
        """Run ``psql`` until the user ends it.

        :raises ShardDatabaseMissing: the shard's schema does not exist. ``psql`` is not started
            then, because the server would skip the schema in the search path, and CREATE statements
            would create tables in another schema.
        """
        if self.connection.settings_dict.get("SCHEMA") is not None:
            with self.connection.cursor() as cursor:
                cursor.execute("SELECT 1")
            self.connection.close()
        super().runshell(parameters)
