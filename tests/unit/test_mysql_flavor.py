"""MariaDB and MySQL are told apart by what each server says of itself."""

from __future__ import annotations

import pytest

from sharded_orm.backends.mysql.session import is_lost
from sharded_orm.mysql_flavor import MARIADB, MYSQL, MySQLFlavor


@pytest.mark.parametrize(
    ("version", "flavor"),
    [
        ("10.11.19-MariaDB-0+deb12u1", MARIADB),
        ("5.5.5-10.4.8-MariaDB-1:10.4.8+maria~bionic-log", MARIADB),
        ("8.4.3", MYSQL),
        ("8.0.36-28", MYSQL),
    ],
)
def test_by_the_version(version: str, flavor: MySQLFlavor) -> None:
    assert MySQLFlavor.of_version(version) is flavor


@pytest.mark.parametrize(
    ("has", "flavor"),
    [
        ({"hostname", "port", "server_id", "server_uid"}, MARIADB),
        ({"hostname", "port", "server_id"}, MARIADB),  # up to 10.5
        ({"hostname", "port", "server_id", "server_uuid"}, MYSQL),
    ],
)
def test_by_the_variables(has: set[str], flavor: MySQLFlavor) -> None:
    assert MySQLFlavor.of_variables(has) is flavor


@pytest.mark.parametrize("flavor", [MARIADB, MYSQL], ids=["MariaDB", "MySQL"])
def test_a_session_that_the_server_ended_is_lost(flavor: MySQLFlavor) -> None:
    from MySQLdb import OperationalError

    assert is_lost(OperationalError(flavor.session_ended, "gone"))
    assert not is_lost(OperationalError(flavor.statement_timeout, "too slow"))
