"""The output in the how-to is the output of the command."""

from __future__ import annotations

import re

from tests.docs.markdown import DOCS, blocks
from tests.integration.promotion.postgresql_site import PostgreSQLSite
from tests.integration.promotion.site import ALL_MOVES, Site
from tests.services.streaming import OTHER_DATABASE


def shown(command: str, number: int = 0) -> list[str]:
    """Return the lines below a command in the how-to, normalized by :func:`normal`.

    :param number: which of the places with that command.
    """
    places = []
    for block in blocks(DOCS / "howto" / "promote.md"):
        for part in re.split(r"^\$ ", block.code, flags=re.MULTILINE):
            first, _, rest = part.partition("\n")
            if first == f"python manage.py shards promote {command}":
                places.append(
                    normal(rest.replace("photos 0-511, albums 0-63", ", ".join(ALL_MOVES)))
                )
    return places[number]


def normal(text: str) -> list[str]:
    """Return lines without the parts that differ each time: positions and seconds."""
    text = re.sub(r"\b(\d+-\d+-\d+|[0-9A-F]+/[0-9A-F]+)\b", "POSITION", text)
    return re.sub(r"\b\d+(\.\d+)? s\b", "SECONDS", text).splitlines()


def test_a_check_and_a_switch(mariadb_site: Site) -> None:
    check_and_switch(mariadb_site, 0)


def test_a_check_and_a_switch_on_postgresql(postgresql_site: PostgreSQLSite) -> None:
    # The how-to's server has no other databases.
    postgresql_site.execute("first", f"DROP DATABASE {OTHER_DATABASE}")
    check_and_switch(postgresql_site, 1)


def check_and_switch(site: Site, number: int) -> None:
    site.write_a_row(1)
    site.wait_until_equal()
    assert normal(site.promote("--check").out) == shown("db1 --check", number)
    done = site.promote("--to", "db2")
    assert normal(done.err + done.out) == shown("db1 --to db2", number)


def test_a_dead_primary(mariadb_site: Site) -> None:
    site = mariadb_site
    site.write_a_row(1)
    site.wait_until_equal()
    site.pair.first.kill()
    done = site.promote("--force", answer="no\n", code=1)
    lines = [*normal(done.err)[:2], *normal(done.out)]
    assert [line.strip() for line in lines] == shown("db1 --force")
