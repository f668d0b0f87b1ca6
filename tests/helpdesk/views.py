"""The pages of one tenant. The tenant is in the address, and every query names it."""

from __future__ import annotations

from typing import Any

from django.contrib.auth.mixins import LoginRequiredMixin
from django.forms import BaseModelForm
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import get_object_or_404
from django.urls import reverse
from django.views.generic import (
    CreateView,
    DeleteView,
    DetailView,
    ListView,
    UpdateView,
)
from django_filters.views import FilterView

import sharded_orm
from tests.helpdesk.filters import CaseFilter
from tests.helpdesk.forms import CaseForm, MessageFormSet
from tests.helpdesk.models import Case, Profile, Tenant


class OfTenant(LoginRequiredMixin):
    """Cases of the tenant in the address."""

    model = Case
    tenant: Tenant
    kwargs: dict[str, Any]

    def setup(self, request: HttpRequest, *args: Any, **kwargs: Any) -> None:
        super().setup(request, *args, **kwargs)
        self.tenant = get_object_or_404(Tenant, pk=kwargs["tenant"])

    def get_queryset(self) -> Any:
        return Case.objects.filter(tenant=self.tenant)


class CaseList(OfTenant, ListView):
    paginate_by = 10
    ordering = ["-opened_at", "-pk"]

    def get_queryset(self) -> Any:
        return self.tenant.cases.order_by(*self.ordering).prefetch_related("tags", "assignee__user")


class CaseFilterView(OfTenant, FilterView):
    filterset_class = CaseFilter

    def get_queryset(self) -> Any:
        return super().get_queryset().order_by("opened_at")


async def overview(request: HttpRequest, tenant: int) -> JsonResponse:
    """The first cases of a tenant, and the number of all."""
    cases = Case.objects.filter(tenant=tenant)
    subjects = [case.subject async for case in cases.order_by("opened_at")[:2]]
    return JsonResponse({"count": await cases.acount(), "subjects": subjects})


class CaseDetail(OfTenant, DetailView):
    def get_context_data(self, **kwargs: Any) -> dict[str, Any]:
        messages = self.object.messages.order_by("sent_at", "pk")
        profile = Profile.objects.filter(user=self.request.user).first()
        return super().get_context_data(
            **kwargs, messages=messages.prefetch_related("attachments"), profile=profile
        )


class CaseEditing(OfTenant):
    form_class = CaseForm

    def get_form_kwargs(self) -> dict[str, Any]:
        kwargs: dict[str, Any] = super().get_form_kwargs()
        return {**kwargs, "tenant": self.tenant}


class CaseCreate(CaseEditing, CreateView):
    pass


class CaseUpdate(CaseEditing, UpdateView):
    """The case with its messages, in a formset."""

    def get_context_data(self, **kwargs: Any) -> dict[str, Any]:
        kwargs.setdefault("formset", MessageFormSet(instance=self.object))
        return super().get_context_data(**kwargs)

    def form_valid(self, form: BaseModelForm) -> HttpResponse:
        # Bound, because the hidden id of a formset's row is looked up among all messages.
        with sharded_orm.bound(tenant=self.tenant):
            formset = MessageFormSet(self.request.POST, instance=self.object)
            if not formset.is_valid():
                return self.render_to_response(self.get_context_data(form=form, formset=formset))
            response = super().form_valid(form)
            formset.save()
            return response


class ProfileUpdate(LoginRequiredMixin, UpdateView):
    """The profile of the user who is logged in, on the user's own shard."""

    fields = ["signature"]
    success_url = "/me/"

    def get_object(self, queryset: Any = None) -> Profile:
        return Profile.objects.get_or_create(user=self.request.user)[0]


class CaseDelete(OfTenant, DeleteView):
    def get_success_url(self) -> str:
        return reverse("cases", args=[self.tenant.pk])
