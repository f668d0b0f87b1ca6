"""Accounts are removed from messages of servers and of this library."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy

import pytest
from django.conf import settings
from django.test import override_settings

from sharded_orm.operations.runs.redaction import without_accounts


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (
            "1045: Access denied for user 'site'@'10.0.0.7' (using password: YES)",
            "1045: Access denied for this account (using password: YES)",
        ),
        (
            "1142: SELECT command denied to user 'it''s'@'%' for table 'a'.'b'",
            "1142: SELECT command denied to this account for table 'a'.'b'",
        ),
        (
            "1226: User 'site' has exceeded the 'max_user_connections' resource",
            "1226: this account has exceeded the 'max_user_connections' resource",
        ),
        (
            "1203: User site already has more than 'max_user_connections' active connections",
            "1203: this account already has more than 'max_user_connections' active connections",
        ),
        (
            "1449: The user specified as a definer ('site'@'%') does not exist",
            "1449: The user specified as a definer (this account) does not exist",
        ),
        (
            "view `rows`: CREATE DEFINER=`site`@`%` VIEW missing",
            "view `rows`: CREATE DEFINER=this account VIEW missing",
        ),
        ("DEFINER=`site`@localhost VIEW", "DEFINER=this account VIEW"),
        (
            "error connecting to master 'repl@10.0.0.7:3306' - retry-time: 60",
            "error connecting to master this account - retry-time: 60",
        ),
        (
            "node 'one' refuses the OPERATOR account 'site': 1045",
            "node 'one' refuses the OPERATOR account: 1045",
        ),
        (
            "the application's account 'site' of node 'one' may write",
            "the application's account of node 'one' may write",
        ),
        (
            'FATAL:  password authentication failed for user "site"',
            "FATAL:  password authentication failed for this account",
        ),
        ('FATAL:  role "site" does not exist', "FATAL:  this account does not exist"),
        (
            "1044: for 'site'@'%' to database 'photos'",
            "1044: for this account to database 'photos'",
        ),
        # A text that names nobody stays.
        (
            "2002: Can't connect to server on 'db2' (111)",
            "2002: Can't connect to server on 'db2' (111)",
        ),
        ("no module named 'users'", "no module named 'users'"),
    ],
)
def test_the_shapes_in_which_servers_name_accounts(text: str, shown: str) -> None:
    assert without_accounts(text) == shown


@pytest.fixture
def configured() -> Iterator[None]:
    changed = deepcopy(settings.SHARDED_ORM)
    first, *_, last = changed["NODES"].values()
    first |= {"USER": "a.name", "OPERATOR": {"USER": "oper", "PASSWORD": "x"}}
    last["USER"] = "photos"
    with override_settings(SHARDED_ORM=changed):
        yield


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("definer 'a.name' and \"oper\"", "definer this account and this account"),
        ("user=a.name host=db1", "this account host=db1"),
        ("account oper is locked", "this account is locked"),
        # A part of another name, or a word, names nobody.
        ("the operation of user operas", "the operation of user operas"),
        ("group 'a-name'", "group 'a-name'"),
    ],
)
@pytest.mark.usefixtures("configured")
def test_the_configured_accounts(text: str, shown: str) -> None:
    assert without_accounts(text) == shown


@pytest.mark.usefixtures("configured")
def test_a_name_that_is_also_a_group_stays() -> None:
    assert without_accounts("group 'photos' has no shard 9") == "group 'photos' has no shard 9"
    assert without_accounts("denied to user 'photos'@'%'") == "denied to this account"
