from __future__ import annotations

from typing import Any

from django.contrib.sitemaps import GenericSitemap, Sitemap

from tests.helpdesk.models import Case, Tenant


class TenantSitemap(Sitemap):
    def items(self) -> Any:
        return Tenant.objects.order_by("pk")

    def location(self, tenant: Tenant) -> str:
        return f"/{tenant.pk}/"


class CaseSitemap(GenericSitemap):
    """The cases of all tenants."""

    limit = 2


sitemaps = {
    "tenants": TenantSitemap,
    "cases": CaseSitemap(
        {"queryset": Case.objects.scatter().order_by("pk"), "date_field": "opened_at"}
    ),
}
