"""The message about a replica that does not replicate from the primary."""

from __future__ import annotations

from sharded_orm.backends.mysql.replication import MySQLReplicationLink, MySQLReplicationServer
from sharded_orm.operations.promotion.preflight import no_link

TEXTS = MySQLReplicationServer.texts


def link(**fields: object) -> MySQLReplicationLink:
    known = {
        "name": "", "host": "10.0.0.7", "port": 3306, "source_id": 7, "receives": True,
        "connecting": False, "executes": True, "uses_gtid": True, "received": "", "executed": "",
        "seconds_behind": 0, "delay": 0, "filters": {}, "error": "",
    }  # fmt: skip
    return MySQLReplicationLink(**{**known, **fields})  # type: ignore[arg-type]  # of the types above


def test_it_replicates_from_another_server() -> None:
    message = no_link("db2", "db1", [link()], TEXTS)
    assert message.startswith(
        "'db2' does not replicate from 'db1', only from 10.0.0.7:3306. RANGES"
    )


def test_it_replicates_from_none() -> None:
    assert ", nor from any other server. RANGES" in no_link("db2", "db1", [], TEXTS)


def test_it_never_was_connected_and_tells_why() -> None:
    """The address does not tell which server that would be."""
    refused = link(source_id=0, receives=False, error="Access denied for user 'repl'")
    expected = "only from 10.0.0.7:3306 (not connected: Access denied for user 'repl'). RANGES"
    assert expected in no_link("db2", "db1", [refused], TEXTS)
    stopped = link(source_id=0, receives=False)
    assert "(not connected: it was stopped. START SLAVE" in no_link("db2", "db1", [stopped], TEXTS)
