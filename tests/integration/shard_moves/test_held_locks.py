"""A move that waits in vain for a lock says of which database, and goes on when it is run again."""

from __future__ import annotations

import sqlite3
from contextlib import closing

import pytest

from tests.integration.shard_moves.site import Site
from tests.integration.stopped_process import go_on, wait_until_stopped

#: A mover that gives up soon.
_MOVE = """
from django.core.management import execute_from_command_line
from sharded_orm.operations.shard_moves import shard_mover
shard_mover.TRIGGER_PATIENCE = 0.1
execute_from_command_line("manage.py shards move accounts 0 --to db2 --patience 1".split())
"""


@pytest.mark.parametrize("site", ["sqlite"], indirect=True)
@pytest.mark.parametrize("node", ["db1", "db2"])
def test_a_locked_file_is_named(site: Site, node: str) -> None:
    for settings in site.nodes.values():
        settings["OPTIONS"]["timeout"] = 0.05
    site.save()
    _, before = site.state()
    mover = site.start(
        "run", _MOVE, STOP_AT="sharded_orm.operations.shard_moves.shard_mover.ShardMover._prepare:1"
    )
    wait_until_stopped(mover)
    path = site.folder / node / "accounts_00000.sqlite3"
    with closing(sqlite3.connect(path)) as other:
        other.execute("BEGIN IMMEDIATE")
        said, error = go_on(mover)
    assert mover.returncode == 1
    assert f"has locked the file {str(path)!r} for longer than OPTIONS['timeout']" in error
    assert f"This was on 'accounts_00000', database {str(path)!r}" in error
    assert "Traceback" not in error
    if node == "db2":  # So does the note about the copy that could not be deleted.
        assert f"has locked the file {str(path)!r}" in said
    for settings in site.nodes.values():
        del settings["OPTIONS"]["timeout"]
    site.save()
    site.move("accounts", "0", "--to", "db2", "--patience", "1")
    assert site.state() == ("db2", before)
