"""The REST interface of one tenant."""

from __future__ import annotations

from typing import Any

from django_filters.rest_framework import DjangoFilterBackend
from rest_framework import pagination, permissions, serializers, viewsets
from rest_framework.filters import OrderingFilter, SearchFilter
from rest_framework.routers import DefaultRouter

from tests.helpdesk.filters import CaseFilter
from tests.helpdesk.models import Case, Message, Tag


class TagsOfTenant(serializers.PrimaryKeyRelatedField):
    """The tags of the tenant in the address."""

    def get_queryset(self) -> Any:
        return Tag.objects.filter(tenant=self.context["view"].kwargs["tenant"])


class MessageSerializer(serializers.ModelSerializer):
    class Meta:
        model = Message
        fields = ["id", "author", "text", "sent_at"]
        read_only_fields = ["id"]


class CaseSerializer(serializers.ModelSerializer):
    tags = TagsOfTenant(many=True, required=False)
    messages = MessageSerializer(many=True, read_only=True)

    class Meta:
        model = Case
        fields = ["id", "tenant", "subject", "status", "assignee", "opened_at", "tags", "messages"]
        read_only_fields = ["id", "tenant"]


class TagSerializer(serializers.ModelSerializer):
    class Meta:
        model = Tag
        fields = ["id", "tenant", "name"]
        read_only_fields = ["id"]


class NewestFirst(pagination.CursorPagination):
    page_size = 3
    ordering = ("-opened_at", "-id")


class OfTenant(viewsets.ModelViewSet):
    """Rows of the tenant in the address."""

    permission_classes = [permissions.IsAuthenticated]

    def get_queryset(self) -> Any:
        return super().get_queryset().filter(tenant=self.kwargs["tenant"])

    def perform_create(self, serializer: Any) -> None:
        serializer.save(tenant_id=self.kwargs["tenant"])


class CaseViewSet(OfTenant):
    queryset = Case.objects.prefetch_related("tags", "messages")
    serializer_class = CaseSerializer
    pagination_class = NewestFirst


class OrderedCaseViewSet(CaseViewSet):
    """The cases page by page, in an order and with words of the caller's choice."""

    pagination_class = pagination.LimitOffsetPagination
    filter_backends = [DjangoFilterBackend, SearchFilter, OrderingFilter]
    filterset_class = CaseFilter
    search_fields = ["subject", "messages__text"]
    ordering = ["opened_at"]


class EveryCaseViewSet(viewsets.ReadOnlyModelViewSet):
    """The cases of all tenants, for the staff."""

    permission_classes = [permissions.IsAdminUser]
    queryset = Case.objects.scatter().prefetch_related("messages").order_by("opened_at")
    serializer_class = CaseSerializer
    pagination_class = NewestFirst
    filter_backends = [DjangoFilterBackend]
    filterset_fields = ["status", "priority"]


class TagViewSet(OfTenant):
    queryset = Tag.objects.order_by("name")
    serializer_class = TagSerializer


router = DefaultRouter()
router.register("cases", CaseViewSet)
router.register("tags", TagViewSet)
router.register("search", OrderedCaseViewSet, basename="search")
staff = DefaultRouter()
staff.register("cases", EveryCaseViewSet, basename="every-case")
