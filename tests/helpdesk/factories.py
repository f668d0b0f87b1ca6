"""Factories of factory_boy."""

from __future__ import annotations

from typing import Any

import factory
from factory.django import DjangoModelFactory

from tests.helpdesk.models import Attachment, Case, Message, Tag, Tenant


class TenantFactory(DjangoModelFactory):
    class Meta:
        model = Tenant
        django_get_or_create = ["slug"]

    slug = factory.Sequence(lambda number: f"tenant-{number}")
    name = factory.LazyAttribute(lambda tenant: tenant.slug.title())


class TagFactory(DjangoModelFactory):
    class Meta:
        model = Tag
        django_get_or_create = ["tenant", "name"]

    tenant = factory.SubFactory(TenantFactory)
    name = "urgent"


class CaseFactory(DjangoModelFactory):
    class Meta:
        model = Case
        skip_postgeneration_save = True

    tenant = factory.SubFactory(TenantFactory)
    subject = factory.Sequence(lambda number: f"Case {number}")
    status = factory.Iterator(Case.Status.values)

    @factory.post_generation
    def tags(self, create: bool, names: Any, **kwargs: Any) -> None:
        if create and names:
            self.tags.set([TagFactory(tenant=self.tenant, name=name) for name in names])


class MessageFactory(DjangoModelFactory):
    class Meta:
        model = Message

    case = factory.SubFactory(CaseFactory)
    # A message has the tenant of its case.
    tenant = factory.SelfAttribute("case.tenant")
    text = factory.Faker("sentence")


class AttachmentFactory(DjangoModelFactory):
    class Meta:
        model = Attachment

    message = factory.SubFactory(MessageFactory)
    tenant = factory.SelfAttribute("message.tenant")
    name = factory.Faker("file_name")


class ThreadFactory(CaseFactory):
    """A case with messages."""

    messages = factory.RelatedFactoryList(MessageFactory, "case", size=3)
