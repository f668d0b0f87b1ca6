"""A helpdesk: tenants and agents are global, everything else of a tenant is on the tenant's shard."""

from __future__ import annotations

from django.contrib.auth.models import User
from django.db import models
from django.urls import reverse
from django.utils.timezone import now

from sharded_orm import ShardedModel, TicketField


class Tenant(models.Model):
    name = models.CharField(max_length=100)
    slug = models.SlugField(unique=True)

    def __str__(self) -> str:
        return self.name


class Agent(models.Model):
    """The profile of a user who answers cases of a tenant."""

    user = models.OneToOneField(User, models.CASCADE, related_name="agent")
    tenant = models.ForeignKey(Tenant, models.CASCADE, related_name="agents")

    def __str__(self) -> str:
        return self.user.username


class OfTenant(ShardedModel):
    tenant = models.ForeignKey(
        Tenant, models.DO_NOTHING, db_constraint=False, related_name="%(class)ss"
    )

    class Meta:
        abstract = True

    class ShardMeta:
        group = "helpdesk"
        shard_key = "tenant"


class Tag(OfTenant):
    id = TicketField(primary_key=True)
    name = models.CharField(max_length=50)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["tenant", "name"], name="tag_of_tenant")]

    def __str__(self) -> str:
        return self.name


class Case(OfTenant):
    class Status(models.TextChoices):
        OPEN = "open"
        CLOSED = "closed"

    id = TicketField(primary_key=True)
    subject = models.CharField(max_length=200)
    status = models.CharField(max_length=10, choices=Status.choices, default=Status.OPEN)
    priority = models.IntegerField(default=0)
    opened_at = models.DateTimeField(default=now)
    assignee = models.ForeignKey(
        Agent,
        models.DO_NOTHING,
        db_constraint=False,
        null=True,
        blank=True,
        related_name="cases",
    )
    tags = models.ManyToManyField(Tag, blank=True, related_name="cases")

    class Meta:
        indexes = [models.Index(fields=["tenant", "-opened_at"], name="case_of_tenant")]

    class ShardMeta(OfTenant.ShardMeta):
        cache = True

    def __str__(self) -> str:
        return self.subject

    def get_absolute_url(self) -> str:
        return reverse("case", args=[self.tenant_id, self.pk])


class Message(OfTenant):
    id = TicketField(primary_key=True)
    case = models.ForeignKey(Case, models.CASCADE, related_name="messages")
    author = models.ForeignKey(
        Agent, models.DO_NOTHING, db_constraint=False, null=True, blank=True, related_name="+"
    )
    text = models.TextField()
    sent_at = models.DateTimeField(default=now)

    def __str__(self) -> str:
        return self.text


class Attachment(OfTenant):
    id = TicketField(primary_key=True)
    message = models.ForeignKey(Message, models.CASCADE, related_name="attachments")
    name = models.CharField(max_length=100)
    size = models.PositiveIntegerField(default=0)

    def __str__(self) -> str:
        return self.name


class Profile(ShardedModel):
    """What a user has chosen; on the shard of the user."""

    user = models.OneToOneField(
        User, models.DO_NOTHING, db_constraint=False, primary_key=True, related_name="profile"
    )
    signature = models.CharField(max_length=200, blank=True)

    class ShardMeta:
        group = "people"
        shard_key = "user"

    def __str__(self) -> str:
        return self.signature
