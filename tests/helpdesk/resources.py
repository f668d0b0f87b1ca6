"""Tables of cases for django-import-export."""

from __future__ import annotations

from typing import Any

from import_export import resources
from import_export.fields import Field
from import_export.widgets import ForeignKeyWidget, ManyToManyWidget

from tests.helpdesk.models import Case, Tag, Tenant


class TagsOfTenant(ManyToManyWidget):
    """Names of tags of the tenant in the same row."""

    def clean(self, value: Any, row: Any = None, **kwargs: Any) -> Any:
        tenant = Tenant.objects.get(slug=row["tenant"])
        return super().clean(value, row, **kwargs).filter(tenant=tenant)


class CaseResource(resources.ModelResource):
    tenant = Field("tenant", "tenant", ForeignKeyWidget(Tenant, "slug"))
    tags = Field("tags", "tags", TagsOfTenant(Tag, field="name"))

    class Meta:
        model = Case
        fields = ["id", "tenant", "subject", "status", "tags"]
        # The shard key finds the row, and all rows are imported in one transaction of the group.
        import_id_fields = ["tenant", "id"]
        using_db = "helpdesk"
