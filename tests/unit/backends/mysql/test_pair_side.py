"""What the operator of a pair may do, and how its sessions stay on one side."""

from __future__ import annotations

import pytest

from sharded_orm.backends.mysql.pair_side import MySQLPairSide, _schema_privileges


@pytest.mark.parametrize(
    ("pattern", "schema", "matches"),
    [
        ("photos_00001", "photos_00001", True),
        (r"photos\_%", "photos_00001", True),
        (r"photos\_%", "photosX00001", False),
        ("photos_%", "photosX00001", True),
        ("%", "anything", True),
        (r"albums\_%", "photos_00001", False),
    ],
)
def test_privileges_on_a_schema_are_found_by_patterns(
    pattern: str, schema: str, matches: bool
) -> None:
    grants = [
        "GRANT USAGE ON *.* TO `operator`@`%` IDENTIFIED BY PASSWORD '*'",
        f"GRANT SELECT, TRIGGER ON `{pattern}`.* TO `operator`@`%`",
        f"GRANT UPDATE ON `{pattern}`.`only_a_table` TO `operator`@`%`",
    ]
    expected = {"SELECT", "TRIGGER"} if matches else set()
    assert _schema_privileges(grants, schema) == expected


def test_a_quiet_session_keeps_the_settings_of_the_site() -> None:
    own = {"OPTIONS": {"init_command": "SET sql_mode = 'ANSI';"}, "HOST": "db1"}
    quiet = MySQLPairSide.quiet_settings(own)
    assert quiet["HOST"] == "db1"
    assert quiet["OPTIONS"]["init_command"].startswith("SET sql_mode = 'ANSI', sql_log_bin = 0,")
    assert own["OPTIONS"] == {"init_command": "SET sql_mode = 'ANSI';"}
    command = MySQLPairSide.quiet_settings({})["OPTIONS"]["init_command"]
    assert command.startswith("SET sql_log_bin = 0,")
