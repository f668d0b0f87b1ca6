"""Text compared by the collations of the server, not by Python's order."""

from __future__ import annotations

import random

import pytest
from django.db import connections
from django.db.models.functions import Collate

from sharded_orm import scatter
from sharded_orm.exceptions import ScatterNotSupported
from tests.integration.scatter.conftest import fetch, one_database, store, targets
from tests.queries.conftest import DATABASES
from tests.samples.models import Sample

pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.django_db(databases=DATABASES, transaction=True),
    pytest.mark.usefixtures("batches"),
]

MYSQL = [
    "utf8mb4_general_ci", "utf8mb4_bin", "utf8mb4_unicode_ci", "utf8mb4_unicode_520_ci",
    "utf8mb4_nopad_bin", "utf8mb4_general_nopad_ci", "utf8mb4_unicode_nopad_ci",
    "utf8mb4_swedish_ci", "utf8mb4_german2_ci", "utf8mb4_danish_ci", "utf8mb4_spanish2_ci",
    "utf8mb4_czech_ci", "utf8mb4_croatian_mysql561_ci", "utf8mb4_turkish_ci",
    "utf8mb4_uca1400_ai_ci", "utf8mb4_uca1400_nopad_ai_ci", "utf8mb4_uca1400_as_cs",
    "utf8mb4_thai_520_w2",
]  # fmt: skip
SQLITE = ["BINARY", "NOCASE", "RTRIM"]
# The last one is made by the test. It takes texts for equal that differ by case or accents.
POSTGRESQL = ["C", "POSIX", "und-x-icu", "de-x-icu", "sv-x-icu", "th-x-icu", "blind"]
COLLATIONS = {"mysql": MYSQL, "sqlite": SQLITE, "postgresql": POSTGRESQL}
_TWO_LEVELS = ("utf8mb4_uca1400_as_cs", "utf8mb4_thai_520_w2", "NOCASE", "RTRIM")

PIECES = [
    "a", "A", "ä", "Ä", "ae", "æ", "å", "aa", "b", "ch", "c", "ç", "d", "ll", "l", "ñ", "ß", "ss",
    "i", "I", "İ", "ı", " ", "  ", "\t", "\x01", "\x00", "-", "_", "0", "Ⅷ", "é", "e\u0301", "😀",
    "😁", "中", "国", "ก", "เก", "\u00a0", "\u200b", "z", "ž", "dž", "ø", "ö", "þ", "ａ", "\ufffd",
]  # fmt: skip


@pytest.fixture(scope="module")
def texts() -> list[str]:
    chosen = random.Random(7)
    return ["", *("".join(chosen.choices(PIECES, k=chosen.randint(1, 4))) for _ in range(250))]


@pytest.fixture
def blind() -> None:
    """A collation of PostgreSQL by which different texts are equal, where all shards find it."""
    if connections["photos_00000"].vendor == "postgresql":
        for alias in ("photos_00000", "photos_00008"):
            with connections[alias].node_cursor() as cursor:
                cursor.execute("CREATE SCHEMA IF NOT EXISTS extensions")
                cursor.execute(
                    "CREATE COLLATION IF NOT EXISTS extensions.blind"
                    " (provider = icu, locale = 'und-u-ks-level1', deterministic = false)"
                )


@pytest.mark.usefixtures("blind")
@pytest.mark.parametrize("collation", [*MYSQL, *SQLITE, *POSTGRESQL])
def test_order_and_equality(texts: list[str], collation: str) -> None:
    vendor = connections["photos_00000"].vendor
    if collation not in COLLATIONS[vendor]:
        pytest.skip("a collation of another database")
    if vendor == "postgresql":
        texts = [text.replace("\x00", "") for text in texts]
    if "nopad" in collation:
        # MariaDB sorts "a" and "a\0" as equal if the key is an expression, and as different if it
        # is a column.
        texts = [text.replace("\x00", "") for text in texts]
    store([Sample(id=n, owner=n % 5, label=text) for n, text in enumerate(texts)])
    collated = one_database(Sample).annotate(key=Collate("label", collation))
    for order in (["key", "id"], ["-key", "-id"]):
        queryset = collated.order_by(*order).values_list("id", flat=True)
        try:
            assert fetch(queryset) == list(queryset)
            part = queryset.all()[10:40]
            assert fetch(part) == list(part)
        except ScatterNotSupported:
            assert collation in _TWO_LEVELS
            continue
        assert collation not in _TWO_LEVELS
    if collation not in _TWO_LEVELS:
        queryset = collated.order_by("key").values_list("key").distinct()
        assert len(fetch(queryset)) == queryset.count()
        assert scatter.count(queryset, targets(queryset)) == queryset.count()


@pytest.mark.parametrize("length", [100, 300, 600, 1500])
def test_long_texts_are_right_or_refused(length: int) -> None:
    store(
        [
            Sample(id=n, owner=n % 5, text="é" * length + str(n * 7 % 10), blob=b"x" * length + bytes([n * 7 % 10]))
            for n in range(10)
        ]
    )  # fmt: skip
    for name in ("text", "blob"):
        queryset = one_database(Sample).order_by(name, "id").values_list("id", flat=True)
        try:
            found = fetch(queryset)
        except ScatterNotSupported:
            assert length > 128
            continue
        assert found == list(queryset)
