"""What cannot be moved is refused with a list, before anything is changed."""

from __future__ import annotations

import pytest

from tests.integration.moves.site import Site

_UNFINISHED = """
from sharded_orm.models import OperationRun
print(list(OperationRun.objects.filter(kind="move keys", unfinished=True)))
"""
_MIGRATION = """
from sharded_orm.operations.runs import journal
with journal.hold_run("migrate", "books", {}) as run:
    pass
"""


def refused(site: Site, *arguments: str, group: str = "books") -> str:
    done = site.manage("keys", "move", group, *arguments, code=1)
    assert site.left() == ""
    # A refused move does not stand in the way of other operations.
    assert site.run(_UNFINISHED) == "[]"
    return done.err


@pytest.mark.parametrize(
    ("group", "key", "why"),
    [("accounts", "a", "computes the shard"), ("pins", "5", "reads the shard from the key")],
)
def test_groups_without_a_directory(site: Site, group: str, key: str, why: str) -> None:
    assert why in refused(site, key, "--to", "1", group=group)


def test_keys_and_targets_that_do_not_exist(site: Site) -> None:
    assert "has no shard of '4711'" in refused(site, "3", "4711", "--to", "1")
    assert "has no shard 9: its shards are 0 to 3" in refused(site, "3", "--to", "9")
    assert "'x' cannot be a shard key of group 'books'" in refused(site, "x", "--to", "1")
    assert (
        "neither the number of a shard nor 'auto'"
        in site.python("manage.py", "keys", "move", "books", "3", "--to", "one").err
    )


def test_closed_targets_and_sites_without_a_lease(site: Site) -> None:
    site.content["sharded_orm"]["GROUPS"]["books"]["RANGES"][0]["open"] = False
    site.save()
    assert "shard 1 of group 'books' is closed" in refused(site, "3", "--to", "1")
    del site.content["sharded_orm"]["PLACEMENT_LEASE"]
    site.save()
    assert "no PLACEMENT_LEASE" in refused(site, "3", "--to", "2")


def test_ids_that_the_target_has(site: Site) -> None:
    site.run("Counted.objects.create(writer_id=1, name='of another')")
    before = site.counts()
    error = refused(site, "3", "--to", "1")
    assert "books_00001 has ids or unique values of the rows of '3'" in error
    assert "library_counted (id) of row 1" in error
    assert site.counts() == before


def test_rows_of_the_key_on_the_target_stay(site: Site) -> None:
    site.run(
        "execute('books_00001', \"INSERT INTO library_topic (id, writer_id, name) VALUES (77, 3, 'stray')\")"
    )
    done = site.move("3", "--to", "1", code=1)
    assert "the target has 1 rows of the key in 'library_topic' already" in done.err
    assert site.left() == ""
    assert site.counts()[1] == 1
    assert site.place() == 3
    done = site.manage("keys", "verify", "books", "3", code=1)
    assert "belongs to shard 3, but shard 1 has 1 rows" in done.err


def test_schemas_that_differ(site: Site) -> None:
    site.run("execute('books_00001', 'ALTER TABLE library_topic ADD COLUMN more INT')")
    error = refused(site, "3", "--to", "1")
    assert "the schemas of books_00001 and books_00003 differ (library_topic)" in error


def test_a_migration_that_was_broken_off(site: Site) -> None:
    site.run(_MIGRATION)
    assert "which was broken off. End it by 'manage.py migrate_shards' first" in refused(
        site, "3", "--to", "1"
    )


def test_a_migration_beside_a_move(site: Site) -> None:
    site.run(_MIGRATION.replace('"migrate"', '"move keys"'))
    site.run("execute('books_00001', 'DELETE FROM django_migrations WHERE app = %s', 'library')")
    done = site.manage("migrate_shards", code=1)
    assert "End it by 'manage.py keys repair books' first" in done.err
    site.manage("keys", "repair", "books")


def test_tables_without_a_model_are_named(site: Site) -> None:
    for number in range(4):
        site.run(f"execute('books_{number:05d}', 'CREATE TABLE notes_of_old (id INT)')")
    done = site.move("3", "--to", "1", "--dry-run")
    assert "the table 'notes_of_old' has no model" in done.out
    assert "1 keys from shard 3 to shard 1" in done.out
    assert site.left() == ""
