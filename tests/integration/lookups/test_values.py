"""Which values are equal is decided as in one database with a unique index, or the value is refused."""

from __future__ import annotations

import unicodedata
import uuid
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import IntegrityError, connections, models, transaction
from django.db.models.sql import InsertQuery
from django.test.utils import isolate_apps
from django.utils.functional import lazystr
from django.utils.safestring import SafeString

from sharded_orm import ShardedModel
from sharded_orm.contrib.lookups import Lookup
from sharded_orm.contrib.lookups.declaration import ModelLookup
from sharded_orm.contrib.lookups.exceptions import LookupRefused
from sharded_orm.contrib.lookups.row_changes import RowFollower
from sharded_orm.exceptions import ShardKeyRequired
from sharded_orm.models.sharding.options import shard_options
from tests.finders.models import Account, PlainAccount, Ticket
from tests.integration.lookups.conftest import differences
from tests.queries.conftest import DATABASES, ONE, SHARD, TWO

pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.django_db(databases=DATABASES, transaction=True),
]

COMPOSED, DECOMPOSED = (unicodedata.normalize(form, "é@x") for form in ("NFC", "NFD"))
TEXTS = [
    "", " ", "ada", "Ada", "ADA", "ada ", " ada", "ada\t", COMPOSED, DECOMPOSED, "ß", "ss", "SS",
    "ﬁ", "fi", "ı", "i", "İ", "😀", "７", "7", "7.0", "07", "a%", "a_", "a\\", "x" * 60, "😀" * 60,
]  # fmt: skip
#: Values that are given for a column of text, or of integers.
GIVEN_AS_TEXT: list[Any] = [
    *TEXTS, None, 7, 7.0, True, Decimal("7.0"), SafeString("ada"), lazystr("ada"), "x" * 61, "a\0",
    b"ada", "\ud800",
]  # fmt: skip
GIVEN_AS_INTEGER: list[Any] = [
    7, "7", " 7", "07", 7.0, 7.5, Decimal("7.0"), Decimal("7.00"), True, "", "x", None, -7, 0, 2**31,
    2**63, float("inf"),
]  # fmt: skip


def outcome(run: Callable[[], Any]) -> Any:
    """What ``run`` returns; or why it is refused by the lookups, by a unique index, or by any column."""
    try:
        return run()
    except (LookupRefused, ShardKeyRequired) as exc:
        return exc
    except IntegrityError:
        return "taken"
    except Exception:
        return "no value"


def ids(model: Any, field: str, value: Any) -> Any:
    """The ids of the rows with a value, as two kinds of queries give them."""
    return outcome(
        lambda: [
            sorted(model.objects.filter(**{name: given}).values_list("id", flat=True))
            for name, given in ((field, value), (f"{field}__in", [value, "7"]))
        ]
    )


def write(model: Any, number: int, field: str, value: Any) -> Any:
    def create() -> str:
        with transaction.atomic(using="photos" if model is Account else "default"):
            model.objects.create(id=number, user_id=(ONE, TWO)[number % 2], **{field: value})
        return "written"

    return outcome(create)


def compare(plain: Any, sharded: Any, what: Any, *, may_refuse: bool) -> None:
    """The two outcomes are equal, or the shards refuse what they cannot tell."""
    if isinstance(sharded, LookupRefused | ShardKeyRequired):
        assert may_refuse, (what, sharded)
    else:
        assert sharded == plain, what


@pytest.fixture
def no_rows(accounts: Any) -> None:
    for account in accounts:
        account.delete()


def test_texts(no_rows: None) -> None:
    for number, text in enumerate(TEXTS):
        for model in (PlainAccount, Account):
            assert write(model, number, "email", text) == "written", text
    for number, text in enumerate(TEXTS, 100):
        for model in (PlainAccount, Account):
            assert write(model, number, "email", text) == "taken", text
    for value in GIVEN_AS_TEXT:
        # NULL is no value of a lookup. Others are texts, or numbers that become texts.
        may_refuse = type(value) not in (str, int, float, bool, Decimal)
        plain, sharded = (ids(model, "email", value) for model in (PlainAccount, Account))
        compare(plain, sharded, value, may_refuse=may_refuse)
    # The text of a row that is gone is free.
    for number, text in enumerate(reversed(TEXTS)):
        for model in (PlainAccount, Account):
            model.objects.filter(user_id=(ONE, TWO)[number % 2], id=number).delete()
        plain, sharded = (write(m, 200 + number, "email", text) for m in (PlainAccount, Account))
        assert plain == sharded, text
    rows = Account.objects.scatter().values_list("id", "email")
    assert sorted(rows) == sorted(PlainAccount.objects.values_list("id", "email"))
    assert differences() == {}


@pytest.mark.parametrize(
    ("field", "values"), [("email", GIVEN_AS_TEXT), ("serial", GIVEN_AS_INTEGER)]
)
def test_values_of_other_types(no_rows: None, field: str, values: list[Any]) -> None:
    simple = (str, int, float, bool, Decimal)
    for number, value in enumerate(values, 10):
        plain, sharded = (write(model, number, field, value) for model in (PlainAccount, Account))
        is_long = isinstance(value, str) and len(value) > 60
        may_refuse = value is not None and (is_long or type(value) not in simple)
        compare(plain, sharded, value, may_refuse=may_refuse)
        if sharded != plain:
            PlainAccount.objects.filter(id=number).delete()
        if sharded == "written" and value is not None:
            (stored,) = PlainAccount.objects.filter(id=number).values_list(field, flat=True)
            assert ids(Account, field, stored) == ids(PlainAccount, field, stored)
    for value in values:
        plain, sharded = (ids(model, field, value) for model in (PlainAccount, Account))
        compare(plain, sharded, value, may_refuse=type(value) not in simple)
    assert differences() == {}


def test_uuids_and_foreign_keys(accounts: Any) -> None:
    code = uuid.uuid4()
    ticket = Ticket.objects.create(user_id=ONE, code=str(code).upper(), account=accounts[0])
    forms = [code, str(code), str(code).upper(), code.hex, f"{{{code}}}", code.urn, code.int]
    for form in forms:
        assert [t.pk for t in Ticket.objects.filter(code=form)] == [ticket.pk], form
    for account in (accounts[0], accounts[0].pk, str(accounts[0].pk), Decimal(accounts[0].pk)):
        assert [t.pk for t in Ticket.objects.filter(account=account)] == [ticket.pk], account
    assert not Ticket.objects.filter(code=uuid.uuid4()).exists()
    assert differences() == {}


@isolate_apps("tests.finders")
def test_other_types_are_refused() -> None:
    """Their equal values may differ as text: Decimal 1.0 and 1.00, times with and without a zone, JSON."""

    class Odd(ShardedModel):
        user_id = models.BigIntegerField()
        decimal = models.DecimalField(max_digits=5, decimal_places=2)
        json = models.JSONField()
        at = models.DateTimeField()
        day = models.DateField()
        clock = models.TimeField()
        ratio = models.FloatField()
        flag = models.BooleanField()
        span = models.DurationField()
        body = models.TextField()
        data = models.BinaryField()
        address = models.GenericIPAddressField()
        file = models.FileField()
        long = models.CharField(max_length=256)

        class Meta:
            app_label = "finders"

        class ShardMeta:
            group = "photos"
            shard_key = "user_id"
            lookups = [
                Lookup(name, unique=True)
                for name in (
                    "decimal", "json", "at", "day", "clock", "ratio", "flag", "span", "body", "data",
                    "address", "file", "long",
                )
            ]  # fmt: skip

    options = shard_options(Odd)
    assert options is not None
    (compiler,) = [InsertQuery(Odd).get_compiler(connection=connections[SHARD[ONE]])]
    for declared in Odd.ShardMeta.lookups:
        lookup = ModelLookup(Odd, Odd._meta.get_field(declared.field), True, options)
        assert lookup.problem is not None
        with pytest.raises(LookupRefused, match="cannot be written"):
            RowFollower([lookup]).write(compiler, lambda: pytest.fail("the row was written"))


@pytest.mark.parametrize("command", ["build", "check"])
def test_a_column_with_another_collation(accounts: Any, command: str) -> None:
    """Somebody has changed the column of one shard by hand."""
    connection = connections[SHARD[TWO]]
    inexact = {
        "mysql": [
            "ALTER TABLE finders_account MODIFY email varchar(60) COLLATE utf8mb4_general_ci"
        ],
        "postgresql": [
            "CREATE COLLATION any_case (provider = icu, locale = 'und-u-ks-level2',"
            " deterministic = false)",
            "ALTER TABLE finders_account ALTER email TYPE varchar(60) COLLATE any_case",
        ],
    }
    exact = {
        "mysql": ["ALTER TABLE finders_account MODIFY email varchar(60) COLLATE utf8mb4_nopad_bin"],
        "postgresql": [
            'ALTER TABLE finders_account ALTER email TYPE varchar(60) COLLATE "default"',
            "DROP COLLATION any_case",
        ],
    }
    if connection.vendor not in inexact:
        pytest.skip("The collation of a column of a file cannot be changed.")
    with connection.cursor() as cursor:
        for sql in inexact[connection.vendor]:
            cursor.execute(sql)
        try:
            with pytest.raises(CommandError, match="has the collation"):
                call_command("lookups", command, "finders.account.email")
        finally:
            for sql in exact[connection.vendor]:
                cursor.execute(sql)
    call_command("lookups", command, "finders.account.email")
