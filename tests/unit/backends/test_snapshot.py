"""Schema snapshots as values: fingerprints, differences, digests of migrations."""

from __future__ import annotations

import pytest

from sharded_orm.backends.snapshot import SchemaSnapshot, applied_digest
from sharded_orm.backends.statements import is_repeatable

PHOTO = (
    "CREATE TABLE `photo` (\n  `id` bigint(20) NOT NULL AUTO_INCREMENT,\n"
    "  `title` varchar(100) NOT NULL DEFAULT 'a, (b',\n  PRIMARY KEY (`id`),\n"
    "  KEY `by_title` (`title`,`id`)\n) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4"
)
LITE = (
    """CREATE TABLE "photo" ("id" integer NOT NULL, "title" varchar(9) DEFAULT 'a, ("b' NOT NULL)"""
)


def of(definition: str, defaults: str = "") -> SchemaSnapshot:
    return SchemaSnapshot({"photo": definition}, defaults)


def test_the_order_of_columns_and_keys_does_not_matter() -> None:
    lines = PHOTO.split("\n")
    lines[1], lines[2] = lines[2], lines[1]
    assert of("\n".join(lines)).fingerprint == of(PHOTO).fingerprint
    other = """CREATE TABLE "photo" ("title" varchar(9) DEFAULT 'a, ("b' NOT NULL, "id" integer NOT NULL)"""
    assert of(other).fingerprint == of(LITE).fingerprint
    assert of(other).differences(of(LITE)) == []


@pytest.mark.parametrize(
    ("old", "new", "start"),
    [
        ("varchar(100)", "varchar(200)", "table 'photo': column 'title' is"),
        ("(`title`,`id`)", "(`id`,`title`)", "table 'photo': key 'by_title' is"),
        ("InnoDB", "MyISAM", "table 'photo': it is"),
        (",\n  KEY `by_title` (`title`,`id`)", "", "table 'photo': key 'by_title' is missing"),
        ("  PRIMARY", "  `more` int,\n  PRIMARY", "table 'photo': column 'more' is not expected"),
    ],
)
def test_differences(old: str, new: str, start: str) -> None:
    changed = of(PHOTO.replace(old, new))
    assert changed.fingerprint != of(PHOTO).fingerprint
    (difference,) = changed.differences(of(PHOTO))
    assert difference.startswith(start)


def test_tables_that_are_missing_or_not_expected() -> None:
    nothing = SchemaSnapshot({})
    assert nothing.is_empty
    assert nothing.differences(of(PHOTO)) == ["table 'photo' is missing"]
    assert of(PHOTO).differences(nothing) == ["table 'photo' is not expected"]
    assert of(PHOTO, "latin1").differences(of(PHOTO, "utf8mb4")) == [
        "the schema's defaults are 'latin1' instead of 'utf8mb4'"
    ]


def test_whether_a_rollback_takes_everything_back() -> None:
    assert of(PHOTO).is_transactional and of(LITE).is_transactional
    assert not of(PHOTO.replace("InnoDB", "MyISAM")).is_transactional


def test_digests_tell_sets_of_migrations_apart() -> None:
    one, two = ("photos", "0001_a"), ("photos", "0002_b")
    assert applied_digest([one, two]) == applied_digest([two, one])
    assert len({applied_digest(rows) for rows in ([], [one], [two], [one, two], [one, one])}) == 5
    assert applied_digest([one, ("sharded_orm", "run 1 step 2")]) == applied_digest([one])


@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        ("ALTER TABLE a ADD b int", True),
        ("DROP INDEX x ON a", True),
        ("TRUNCATE a", False),
        ("RENAME TABLE a TO b", False),
        ("ALTER TABLE a EXCHANGE PARTITION p WITH TABLE b", False),
        ("CREATE TABLE a SELECT 1", False),
    ],
)
def test_what_may_be_run_again_when_it_left_no_change(sql: str, expected: bool) -> None:
    assert is_repeatable(sql) is expected
