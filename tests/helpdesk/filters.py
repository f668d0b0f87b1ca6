"""Filters of cases for django-filter, for pages and for the REST interface."""

from __future__ import annotations

from typing import Any

import django_filters

from tests.helpdesk.models import Case, Tag


def tags_of_tenant(request: Any) -> Any:
    return Tag.objects.filter(tenant=request.resolver_match.kwargs["tenant"])


class CaseFilter(django_filters.FilterSet):
    tags = django_filters.ModelMultipleChoiceFilter(queryset=tags_of_tenant)
    text = django_filters.CharFilter(field_name="messages__text", lookup_expr="icontains")
    order = django_filters.OrderingFilter(fields=["priority", "opened_at"])

    class Meta:
        model = Case
        fields = {"status": ["exact"], "priority": ["gte", "lte"], "assignee": ["exact", "isnull"]}
