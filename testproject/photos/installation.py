"""Creates and fills the site; every step may be repeated."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

from django.contrib.auth import get_user_model
from django.core.management import call_command
from django.db import connections

from sharded_orm import runtime
from sharded_orm.operations import tickets
from testproject.activity import sample as activity
from testproject.boards import sample as sample_boards
from testproject.databases import ALIASES, TICKETS
from testproject.photos import sample

ADMIN = "admin"


def prepare() -> Iterator[str]:
    """Create and migrate all databases and add the sample content; yield a line per step."""
    for alias in ALIASES:
        wrapper: Any = connections[alias]
        wrapper.create_shard_database()
        if alias not in TICKETS:
            call_command("migrate", database=alias, interactive=False, verbosity=0)
            yield f"database {alias!r} is migrated: {wrapper.settings_dict['NAME']}"
    for name, group in runtime.topology().groups.items():
        call_command("migrate_shards", group=name, create=True, verbosity=0)
        nodes = dict.fromkeys(r.primary for r in group.ranges)
        yield f"group {name!r} is migrated: {group.count} shards on {', '.join(nodes)}"
    call_command("lookups", "build", verbosity=0)
    yield "old addresses find the shards of their photos"
    sequences = {one.name for one in tickets.create()}
    yield f"the ticket servers {' and '.join(TICKETS)} have {len(sequences)} sequences"
    activity.serve_indexes()
    added = sample.make()
    activity.make()
    yield (
        f"sample content: {added.users} users, {added.photos} photos, {added.tags} tags and"
        f" {added.comments} comments made"
        if added.photos or added.tags
        else "sample content: there already"
    )
    pins = sample_boards.make()
    yield f"sample boards: {pins} pins made" if pins else "sample boards: there already"


def admin_password() -> str:
    """Set and return a new password of the account ``admin``, which is created if it is missing."""
    admin, _ = get_user_model().objects.get_or_create(
        username=ADMIN, defaults={"is_staff": True, "is_superuser": True}
    )
    password = secrets.token_urlsafe(9)
    admin.set_password(password)
    admin.save(update_fields=["password"])
    return password
