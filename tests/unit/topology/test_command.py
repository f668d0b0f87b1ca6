"""Options of ``manage.py topology`` are checked before a source is contacted."""

from __future__ import annotations

import pytest
from django.core.management import CommandError, call_command


@pytest.mark.parametrize(
    "arguments",
    [
        *(["history", "--limit", limit] for limit in ("0", "-5", "x", "\u0663", "9" * 5000)),
        *(["rollback", "1", "--wait", seconds] for seconds in ("nan", "inf", "-1", "x")),
    ],
)
def test_numbers_that_are_none(arguments: list[str]) -> None:
    with pytest.raises(CommandError, match="is no number of"):
        call_command("topology", *arguments)
