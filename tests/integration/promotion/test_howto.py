"""The output in the how-to is the output of the command."""

from __future__ import annotations

import re

import pytest

from tests.docs.markdown import DOCS, blocks
from tests.integration.promotion.site import ALL_MOVES, Site
from tests.services.replication import wait_until_equal


@pytest.fixture
def site(mariadb_site: Site) -> Site:
    return mariadb_site


def shown(command: str) -> list[str]:
    """Return the lines below a command in the how-to, normalized by :func:`normal`."""
    for block in blocks(DOCS / "howto" / "promote.md"):
        first, _, rest = block.code.partition("\n")
        if first == f"$ python manage.py shards promote {command}":
            return normal(rest.replace("photos 0-511, albums 0-63", ", ".join(ALL_MOVES)))
    raise LookupError(command)


def normal(text: str) -> list[str]:
    """Return lines without the parts that differ each time: positions and seconds."""
    text = re.sub(r"\b\d+-\d+-\d+\b", "POSITION", text)
    return re.sub(r"\b\d+(\.\d+)? s\b", "SECONDS", text).splitlines()


def test_a_check_and_a_switch(site: Site) -> None:
    site.write_a_row(1)
    wait_until_equal(site.pair)
    assert normal(site.promote("--check").out) == shown("db1 --check")
    done = site.promote("--to", "db2")
    assert normal(done.err + done.out) == shown("db1 --to db2")


def test_a_dead_primary(site: Site) -> None:
    site.write_a_row(1)
    wait_until_equal(site.pair)
    site.pair.first.kill()
    done = site.promote("--force", answer="no\n", code=1)
    lines = [*normal(done.err)[:2], *normal(done.out)]
    assert [line.strip() for line in lines] == shown("db1 --force")
