"""``shards import --follow`` brings every change of the source to the shards, until the switch."""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Sequence

import pytest

from tests.integration.imports.site import DEFINITIONS, MODELS, Done, Site
from tests.integration.imports.test_copy import _RELATED, _SAME
from tests.patience import PATIENCE

#: Changes of every kind of table. Writer n % 8 + 1 has book n.
CHANGES = """
def change(sql, *params):
    # The tables' own foreign keys do not matter here.
    with unchecked("default"):
        execute("default", sql, *params)

change("UPDATE library_book SET title = 'changed' WHERE id = 5")
change("UPDATE library_novel SET genre = 'short' WHERE book_ptr_id = 7")
change("UPDATE library_topic SET name = 'changed' WHERE id = 3")
change("UPDATE library_review SET book_id = 13 WHERE writer_id = 6 AND number = 5")
# Deletes of a row in each table; book 10 is a novel with a topic and a review.
change("DELETE FROM library_book_topics WHERE id = 11")
change("DELETE FROM library_review WHERE writer_id = 3 AND number = 10")
change("DELETE FROM library_book_topics WHERE book_id = 10")
change("DELETE FROM library_novel WHERE book_ptr_id IN (10, 13)")
change("DELETE FROM library_book WHERE id = 10")
change("DELETE FROM library_counted WHERE id = 2")
# The parent goes first, which a program without foreign keys may do.
change("DELETE FROM library_book WHERE id = 16")
change("DELETE FROM library_novel WHERE book_ptr_id = 16")
change("DELETE FROM library_book_topics WHERE book_id = 16")
change("DELETE FROM library_review WHERE book_id = 16")
# Shard keys and primary keys change.
change("UPDATE library_book SET writer_id = 8 WHERE id = 4")
change("UPDATE library_topic SET writer_id = 8 WHERE id = 4")
change("UPDATE library_review SET writer_id = 8, number = 44 WHERE book_id = 4")
change("UPDATE library_book SET id = 1000 WHERE id = 6")
change("UPDATE library_book_topics SET book_id = 1000 WHERE book_id = 6")
change("UPDATE library_review SET book_id = 1000 WHERE book_id = 6")
# An id comes back with another key.
change("DELETE FROM library_book_topics WHERE book_id = 9")
change("DELETE FROM library_review WHERE book_id = 9")
change("DELETE FROM library_book WHERE id = 9")
insert(Book, [book(9, writer_id=5, title="again")])
insert(Book.topics.through, [{"id": 300, "book_id": 9, "topic_id": 4}])
"""


def follow(site: Site, *options: str, code: int = 0, **environment: str) -> Done:
    return site.copy("--follow", "--until-current", *options, code=code, **environment)


def prepare(site: Site) -> None:
    site.fill()
    site.run(DEFINITIONS + _RELATED)


def assert_same(site: Site) -> None:
    assert site.run(_SAME) == "[]"


def test_every_change_of_every_kind_of_table_is_followed(site: Site) -> None:
    prepare(site)
    report = follow(site, "--json").json
    assert report["ok"], report
    assert_same(site)
    site.run(DEFINITIONS + CHANGES)
    report = follow(site, "--json").json
    assert report["applied"] > 20
    assert report["left"] == 0
    assert_same(site)
    site.copy("--verify")
    assert follow(site, "--json").json["applied"] == 0


def test_a_project_of_djangos_own_backend_is_followed(site: Site) -> None:
    databases = site.content["databases"]
    engine = f"django.db.backends.{site.backend}"
    databases["old"] = {**databases["default"], "ENGINE": engine}
    site.save()
    prepare(site)
    options = ("shards", "import", *MODELS, "--from", "old")
    site.manage(*options, "--follow", "--until-current")
    site.run(DEFINITIONS + CHANGES)
    site.manage(*options, "--switch")
    assert_same(site)
    assert "closed for writes" in refused(site)
    assert site.manage(*options, "--unfollow").out == (
        "'old' is followed no more: its tables have no triggers of the import, and take writes.\n"
    )
    assert leftovers(site) == "[]"


def refused(
    site: Site, statement: str = "UPDATE library_book SET title = 'late' WHERE id = 1"
) -> str:
    """Execute a statement on the source, and return its error; "" if it has none."""
    return site.run(
        "from django.db import Error\n"
        f"try: execute('default', {statement!r})\n"
        "except Error as exc: print(exc)"
    )


def leftovers(site: Site) -> str:
    """The tables and triggers of --follow on the source."""
    return site.run(
        """
with connections["default"].cursor() as cursor:
    names = connections["default"].introspection.table_names(cursor)
if connections["default"].vendor == "sqlite":
    triggers = execute("default", "SELECT name FROM sqlite_master WHERE type = 'trigger'")
else:
    schema = "current_schema()" if connections["default"].vendor == "postgresql" else "DATABASE()"
    triggers = execute(
        "default",
        f"SELECT trigger_name FROM information_schema.triggers WHERE event_object_schema = {schema}",
    )
print([name for name in [*names, *(name for name, in triggers)] if "capture" in name])
"""
    )


def test_the_source_is_closed_by_the_switch_and_opened_again(site: Site) -> None:
    prepare(site)
    report = site.copy("--switch", "--json").json
    assert report["ok"], report
    assert report["closed"]
    assert report["seconds"] > 0
    assert report["tables"]["library.Book"] == {"rows": 43, "on shards": 43}
    for statement in (
        "INSERT INTO library_topic (id, writer_id, name) VALUES (99, 1, 'late')",
        "UPDATE library_book SET title = 'late' WHERE id = 1",
        "DELETE FROM library_book_topics",
    ):
        assert "closed for writes; see 'manage.py shards import --unfollow'" in refused(
            site, statement
        )
    assert_same(site)
    error = follow(site, code=1).err
    assert "'default' was closed for writes by --switch" in error
    # The switch may be repeated.
    assert site.copy("--switch", "--json").json["closed"]
    site.copy("--unfollow")
    assert leftovers(site) == "[]"
    assert refused(site) == ""
    site.copy("--unfollow")


def test_nothing_is_lost_while_the_site_writes_until_the_switch(site: Site) -> None:
    site.fill()
    writer = site.start(
        "run",
        "from tests.integration.imports.site import PREAMBLE\n"
        "exec(PREAMBLE)\n" + DEFINITIONS + "from itertools import count\n"
        "import time\n"
        "from django.db import Error\n"
        "try:\n"
        "    for pk in count(1000):\n"
        "        time.sleep(0.01)  # Otherwise nobody else gets the lock of SQLite.\n"
        "        insert(Book, [book(pk)])\n"
        "        execute('default', 'UPDATE library_book SET title = %s WHERE id = %s', f'new {pk}', pk - 5)\n"
        "        execute('default', 'UPDATE library_book SET writer_id = %s WHERE id = %s', pk % 3 + 1, pk - 9)\n"
        "        execute('default', 'DELETE FROM library_book WHERE id = %s', pk - 20)\n"
        "        if pk == 1010: print('begun', flush=True)\n"
        "except Error as exc:\n"
        "    print(exc)\n",
    )
    assert writer.stdout is not None
    assert writer.stdout.readline() == "begun\n"
    site.copy("--switch", "--rows", "7")
    out, err = writer.communicate(timeout=PATIENCE)
    assert writer.returncode == 0, err
    assert "closed for writes" in out
    assert_same(site)
    site.copy("--verify")


#: In the middle of an application, before and after its entries are forgotten; in the middle of a switch.
_PACKAGE = "sharded_orm.operations.imports"
MOMENTS = [
    f"{_PACKAGE}.row_storage.ShardTable.remove:1",
    f"{_PACKAGE}.row_storage.ShardTable.remove:3",
    f"{_PACKAGE}.row_storage.ShardTable.store:1",
    f"{_PACKAGE}.row_storage.ShardTable.store:6",
    f"{_PACKAGE}.change_application.ChangeApplication.apply:1",
    f"{_PACKAGE}.source_journal.SourceJournal.forget:1",
]
SWITCHES = [
    f"{_PACKAGE}.source_journal.SourceJournal.close:1",
    f"{_PACKAGE}.source_follower._Follower._count:1",
]


def killed(site: Site, moment: str, *options: str) -> None:
    done = site.python(
        "manage.py", "shards", "import", *MODELS, "--from", "default", *options, KILL_AT=moment
    )
    assert done.code == -signal.SIGKILL, f"{moment} did not come: {done.out} {done.err}"


def test_following_goes_on_after_a_kill_at_any_moment(site: Site) -> None:
    prepare(site)
    follow(site)
    site.run(DEFINITIONS + CHANGES)
    for moment in MOMENTS:
        killed(site, moment, "--follow", "--until-current")
        if moment.endswith("forget:1"):
            break
        # A second change of a row whose first change was applied in part.
        site.run("execute('default', 'UPDATE library_topic SET name = %s', 'more')")
    follow(site)
    assert_same(site)


def test_a_first_copy_goes_on_after_a_kill(site: Site) -> None:
    prepare(site)
    killed(site, f"{_PACKAGE}.source_journal.SourceJournal.install:1", "--follow")
    killed(site, "done:2", "--follow", "--rows", "9")
    site.run(DEFINITIONS + CHANGES)
    follow(site, "--rows", "9")
    assert_same(site)


def test_a_switch_goes_on_after_a_kill(site: Site) -> None:
    prepare(site)
    follow(site)
    site.run(DEFINITIONS + CHANGES)
    for moment in SWITCHES:
        killed(site, moment, "--switch")
        assert "closed for writes" in refused(site)
    site.copy("--switch")
    assert_same(site)


def test_rows_that_exchange_a_unique_value(site: Site) -> None:
    site.run(
        DEFINITIONS
        + """
insert(Topic, [{"id": n, "name": f"topic {n}", "writer_id": 1} for n in (1, 2, 3)])
from sharded_orm import runtime
for alias in ("default", *(shard.alias for shard in runtime.group("books").shards())):
    execute(alias, "CREATE UNIQUE INDEX only_name ON library_topic (name)")
"""
    )
    models = ["library.Topic"]
    site.copy("--follow", "--until-current", models=models)
    site.run(
        """
for pk, name in ((3, "aside"), (2, "topic 3"), (1, "topic 2"), (3, "topic 1")):
    execute("default", "UPDATE library_topic SET name = %s WHERE id = %s", name, pk)
"""
    )
    site.copy("--follow", "--until-current", models=models)
    site.copy("--verify", models=models)


def test_a_row_of_another_owner_with_the_same_id_stays(site: Site) -> None:
    """The ids of Counted are counted by each shard, so two owners may have the same one."""
    site.run(
        DEFINITIONS + "insert(Counted, [{'id': n, 'name': f'{n}', 'writer_id': 1} for n in (1, 2)])"
    )
    models = ["library.Counted"]
    site.copy("--follow", "--until-current", models=models)
    put = (
        "alias = next(s.alias for s in runtime.group('books').shards()"
        " if s.alias != runtime.locate('books', 1).alias)\n"
    )
    site.run(
        "from sharded_orm import runtime\n" + put + "execute(alias, 'INSERT INTO library_counted"
        " (id, writer_id, name) VALUES (1, 77, %s), (2, 77, %s)', 'own', 'own')\n"
        "execute('default', 'DELETE FROM library_counted WHERE id = 1')"
    )
    site.copy("--follow", "--until-current", models=models)
    rows = "print(sorted(Counted.objects.scatter().values_list('pk', 'name')))"
    assert site.run(rows) == "[(1, 'own'), (2, '2'), (2, 'own')]"
    # Rows that the source does not have are named at the switch.
    report = site.copy("--switch", "--json", models=models, code=1).json
    assert report["closed"]
    assert "1 rows on 'default' and 3 on the shards" in report["problems"][0]


def test_one_process_follows_until_it_is_stopped(site: Site) -> None:
    site.fill()
    process = site.start("manage.py", "shards", "import", *MODELS, "--from", "default", "--follow")
    assert process.stderr is not None
    lines: list[str] = []
    while "The shards are current" not in "".join(lines[-1:]):
        lines.append(process.stderr.readline())
        assert lines[-1], lines
    for option in ("--follow", "--switch", "--unfollow"):
        assert "'import follow' on 'books'" in site.copy(option, code=1).err
    site.run("execute('default', 'DELETE FROM library_book WHERE id = 7')")
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + signal.SIGTERM, err
    assert "the same command goes on from here" in err
    follow(site)
    assert 7 not in site.ids()
    error = follow_models(site, ["library.Topic"], code=1).err
    assert "Name the same ones to go on" in error


def follow_models(site: Site, models: Sequence[str], code: int = 0) -> Done:
    return site.copy("--follow", "--until-current", models=models, code=code)


def test_an_open_transaction_keeps_the_source_open(site: Site) -> None:
    prepare(site)
    follow(site)
    gate = site.folder / "gate"
    os.mkfifo(gate)
    writer = site.start(
        "run",
        "from tests.integration.imports.site import PREAMBLE\n"
        "exec(PREAMBLE)\n"
        "with transaction.atomic(using='default'):\n"
        "    execute('default', 'UPDATE library_book SET title = %s WHERE id = 1', 'open')\n"
        "    print('open', flush=True)\n"
        f"    open({str(gate)!r}).read()\n",
    )
    assert writer.stdout is not None
    assert writer.stdout.readline() == "open\n"
    # On SQLite, nobody else can write, not even to the journal of runs.
    if site.backend != "sqlite3":
        error = site.copy("--switch", "--patience", "0.2", code=1).err
        assert "was not closed and can be written as before" in error, error
        assert refused(site, "UPDATE library_book SET title = 'free' WHERE id = 2") == ""
    gate.write_text("go on")
    _, err = writer.communicate(timeout=PATIENCE)
    assert writer.returncode == 0, err
    site.copy("--switch")
    assert_same(site)


def test_missing_triggers_are_noticed(site: Site) -> None:
    site.fill()
    follow(site)
    site.run(
        "from sharded_orm.backends.change_capture import trigger_name\n"
        "table = ' ON library_book' if connections['default'].vendor == 'postgresql' else ''\n"
        "execute('default', f\"DROP TRIGGER {trigger_name('library_book', 'DELETE')}{table}\")"
    )
    assert "Triggers of --follow are missing on 'default'" in follow(site, code=1).err
    site.copy("--unfollow")
    follow(site)


def test_what_cannot_be_followed_is_refused_before_anything_is_written(site: Site) -> None:
    site.fill()
    site.run(
        "execute('default', 'ALTER TABLE library_novel ADD FOREIGN KEY (book_ptr_id)"
        " REFERENCES library_book (id) ON DELETE CASCADE')"
        if site.backend == "mysql"
        else "execute('default', 'INSERT INTO library_review (writer_id, number, book_id) VALUES (1, 1, 39)')"
    )
    error = follow(site, code=1).err
    assert "refused, and nothing was written" in error
    if site.backend == "mysql":
        assert "'library_novel' on 'default' cannot be followed" in error
    assert leftovers(site) == "[]"
    assert site.ids() == []


@pytest.mark.parametrize("site", ["mariadb", "postgresql"], indirect=True)
def test_an_account_that_may_not_create_triggers_is_refused(site: Site) -> None:
    site.fill()
    account = f"reader_{secrets.token_hex(4)}"
    settings = {**site.content["databases"]["default"], "USER": account, "PASSWORD": "secret"}
    site.content["databases"]["old"] = settings
    site.save()
    if site.backend == "mysql":
        create = [
            f"CREATE USER {account}@'%%' IDENTIFIED BY 'secret'",
            f"GRANT SELECT ON {settings['NAME']}.* TO {account}@'%%'",
        ]
        drop = [f"DROP USER {account}@'%%'"]
        user, remedy = f"{account}@%", "grant it ALL PRIVILEGES on that database"
    else:
        create = [
            f"CREATE ROLE {account} LOGIN PASSWORD 'secret'",
            f"GRANT SELECT ON ALL TABLES IN SCHEMA public TO {account}",
        ]
        drop = [f"DROP OWNED BY {account}", f"DROP ROLE {account}"]
        user, remedy = account, "grant it CREATE on the schema 'public'"

    def execute(statements: list[str]) -> None:
        site.run("\n".join(f"execute('default', {statement!r})" for statement in statements))

    execute(create)
    try:
        models = ("shards", "import", *MODELS, "--from", "old")
        error = site.manage(*models, "--follow", "--until-current", code=1).err
    finally:
        execute(drop)
    assert f"the account {user!r} cannot create triggers on 'old'" in error
    assert remedy in error
    assert leftovers(site) == "[]"
    assert site.ids() == []
