"""What cannot be imported is refused with the reason, before anything is written."""

from __future__ import annotations

import secrets

import pytest

from tests.integration.imports.site import DEFINITIONS, Site, administrator

CASES = {
    "a row without a key": (
        "nullable('library_book', 'writer_id'); execute('default', 'UPDATE library_book SET writer_id"
        " = NULL WHERE id = 7')",
        "1 rows of library.Book on 'default' have writer_id=NULL, the shard key (pk 7)",
    ),
    "a key that refers to no row": (
        "execute('default', 'UPDATE library_book SET writer_id = 99 WHERE id = 7')",
        "1 rows of library.Book refer by 'writer' to rows of library.Writer that do not exist"
        " (writer_id = 99)",
    ),
    "a foreign key that refers to no row": (
        "execute_unchecked('UPDATE library_book SET sequel_of_id = 99 WHERE id = 7')",
        "1 rows of library.Book refer by 'sequel_of' to rows of library.Book that do not exist",
    ),
    "a relation to a row of another key": (
        "execute('default', 'UPDATE library_book SET sequel_of_id = 8 WHERE id = 7')",
        "1 rows of library.Book are related by 'sequel_of' to rows of library.Book with another shard"
        " key (pk 7)",
    ),
    "a many-to-many relation to a row of another key": (
        "insert(Topic, [{'id': 1, 'name': 't', 'writer_id': 1}]);"
        " insert(Book.topics.through, [{'id': 1, 'book_id': 7, 'topic_id': 1}])",
        "1 rows of library.Book_topics are related by 'topics' to rows of library.Topic with another"
        " shard key",
    ),
    "a table that is missing": (
        "execute('default', 'DROP TABLE library_book_topics')",
        "'default' has no table 'library_book_topics' of library.Book_topics",
    ),
    "a column that is missing": (
        "execute('default', 'ALTER TABLE library_book DROP COLUMN title')",
        "lacks the columns ['title'] of library.Book",
    ),
    "a column that the model has not": (
        "execute('default', 'ALTER TABLE library_book ADD COLUMN old integer')",
        "has the columns ['old'], which library.Book has not",
    ),
}
_HELPERS = """
def nullable(table, column):
    if connections["default"].vendor == "mysql":
        execute("default", f"ALTER TABLE {table} MODIFY {column} bigint NULL")
    else:
        with connections["default"].schema_editor() as editor:
            editor.alter_field(Book, Book._meta.get_field("writer"), nullable_key())
def nullable_key():
    field = models.BigIntegerField(null=True, db_column="writer_id")
    field.set_attributes_from_name("writer")
    field.model = Book
    return field
def execute_unchecked(sql):
    with unchecked("default"):
        execute("default", sql)
"""


@pytest.mark.parametrize("case", CASES)
def test_rows_and_tables(site: Site, case: str) -> None:
    site.fill()
    code, message = CASES[case]
    site.run(DEFINITIONS + _HELPERS + code)
    models = ["library.Book", "library.Topic"]
    for options in ((), ("--dry-run",)):
        done = site.copy(*options, models=models, code=1)
        assert message in done.err, done.err
        assert "nothing was written" in done.err
    assert site.ids() == []
    placed = "from sharded_orm.models import Placement; print(Placement.objects.count())"
    assert site.run(placed) == "0"


def test_models_and_sources(site: Site) -> None:
    def error(*models: str, source: str = "default") -> str:
        return site.manage("shards", "import", *models, "--from", source, code=1).err

    books = ("library.Book", "library.Topic")
    assert "'books_00001' is a shard or a group" in error(*books, source="books_00001")
    assert "'books' is a shard or a group" in error(*books, source="books")
    assert "DATABASES has no alias 'nowhere'" in error(*books, source="nowhere")
    assert "library.Writer is not sharded" in error("library.Writer")
    assert "no model 'library.Nothing'" in error("library.Nothing")
    assert "of the groups ['accounts', 'books']" in error("library.Account", "library.Topic")
    assert "refers to library.Book, which is not imported" in error("library.Review")
    assert "refers to library.Topic, which is not imported" in error("library.Book")


def test_shards_that_are_not_migrated(site: Site) -> None:
    site.fill()
    site.manage("migrate", "library", "zero", "--database", "books_00002", "--verbosity", "0")
    error = site.copy(code=1).err
    assert "shards 2 of group 'books' are not migrated: run 'manage.py migrate_shards" in error


def test_ids_with_the_number_of_another_shard(site: Site) -> None:
    site.run(
        DEFINITIONS
        + """
from sharded_orm.ids.layout import PACKED
one, two = (PACKED.pack(shard, 1, 1) for shard in (1, 2))
insert(Board, [{"id": one, "name": "1"}, {"id": two, "name": "2"}])
insert(Pin, [{"id": PACKED.pack(1, 2, 5), "board_id": one}])
"""
    )
    models = ["library.Board", "library.Pin"]
    site.copy(models=models)
    site.copy("--verify", models=models)
    site.run(
        DEFINITIONS
        + "from sharded_orm.ids.layout import PACKED\n"
        + "insert(Pin, [{'id': PACKED.pack(1, 2, 6), 'board_id': PACKED.pack(2, 1, 1)}])"
    )
    error = site.copy(models=models, code=1).err
    assert "an id of shard 1, but its key belongs on shard 2" in error


def test_primary_keys_that_their_field_changes(site: Site) -> None:
    """Ranges are cut by what the field reads, but rows are copied as they are stored."""
    output = site.run(
        """
from django.core.management import CommandError, call_command
class Negative(models.BigAutoField):
    def from_db_value(self, value, *args):
        return None if value is None else -value
    def get_prep_value(self, value):
        return None if value is None else -value
Counted._meta.pk.__class__ = Negative
try:
    call_command("shards", "import", "library.Counted", source="default", verbosity=0)
except CommandError as exc:
    print(exc)
"""
    )
    assert "the primary key 'id' of library.Counted cannot be copied" in output


@pytest.mark.parametrize("site", ["postgresql"], indirect=True)
def test_an_account_that_cannot_switch_foreign_keys_off_is_refused(site: Site) -> None:
    """Rows come in another order than their foreign keys, which only a privileged account ignores."""
    site.fill()
    account = f"importer_{secrets.token_hex(4)}"
    nodes = [dict(node) for node in site.nodes.values()]
    for node in nodes:
        with administrator(node) as run:
            run(f"CREATE ROLE {account} LOGIN PASSWORD 'secret'")
            run(f"GRANT {node['USER']} TO {account}")
    for node in site.nodes.values():
        node |= {"USER": account, "PASSWORD": "secret"}
    site.save()
    grant = "SET ON PARAMETER session_replication_role"
    try:
        error = site.copy(code=1).err
        assert error.count(f"account '{account}' of the node") == 2, error
        assert error.count(f'GRANT {grant} TO "{account}"') == 2, error
        for node in site.nodes.values():
            del node["USER"]
        site.save()
        error = site.copy(code=1, PGUSER=account).err
        assert error.count(f'GRANT {grant} TO "{account}"') == 2, error
        for node in site.nodes.values():
            node["USER"] = account
        site.save()
        assert site.ids() == []
        for node in nodes:
            with administrator(node) as run:
                run(f"GRANT {grant} TO {account}")
        site.copy()
        site.copy("--verify")
    finally:
        for node in nodes:
            with administrator(node) as run:
                run(f"REVOKE {grant} FROM {account}")
                run(f"DROP ROLE {account}")
