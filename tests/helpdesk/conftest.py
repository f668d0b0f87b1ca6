"""Two tenants on two nodes, with an agent each."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from django.contrib.auth.models import User
from django.test import Client

from sharded_orm import runtime
from sharded_orm.models import Placement
from tests.helpdesk.models import Agent, Case, Tag, Tenant

DATABASES = ["default", "directory", "tickets_1", "tickets_2", "helpdesk", "people"]


@dataclass
class Desk:
    """A tenant with an agent, who is logged in with ``client``, and a tag."""

    tenant: Tenant
    agent: Agent
    client: Client
    tag: Tag

    def case(self, subject: str = "Printer on fire", **fields: object) -> Case:
        return Case.objects.create(tenant=self.tenant, subject=subject, **fields)

    def url(self, rest: str = "") -> str:
        return f"/{self.tenant.pk}/{rest}"

    def api(self, rest: str = "") -> str:
        return f"/api/{self.tenant.pk}/{rest}"


def open_desk(name: str, shard: int) -> Desk:
    """A new tenant, whose rows are on ``shard``."""
    tenant = Tenant.objects.create(name=name, slug=name.lower())
    Placement.objects.using("directory").create(group="helpdesk", key=str(tenant.pk), shard=shard)
    user = User.objects.create_user(f"agent of {name}", password="secret")
    agent = Agent.objects.create(user=user, tenant=tenant)
    client = Client()
    client.force_login(user)
    return Desk(tenant, agent, client, Tag.objects.create(tenant=tenant, name="urgent"))


@pytest.fixture
def desk(db: None) -> Desk:
    return open_desk("Acme", 3)


@pytest.fixture
def other(desk: Desk) -> Desk:
    """Another tenant, on the other node."""
    return open_desk("Globex", 40)


@pytest.fixture
def neighbour(desk: Desk) -> Desk:
    """Another tenant, on the same shard."""
    return open_desk("Initech", 3)


@pytest.fixture
def nodes() -> tuple[str, str]:
    """The nodes of ``desk`` and of ``other``."""
    group = runtime.group("helpdesk")
    return group.shard(3).node, group.shard(40).node
