"""Forms of one tenant's rows."""

from __future__ import annotations

from typing import Any

from django import forms

from tests.helpdesk.models import Case, Message, Tenant


class CaseForm(forms.ModelForm):
    class Meta:
        model = Case
        fields = ["subject", "status", "priority", "assignee", "tags"]

    def __init__(self, *args: Any, tenant: Tenant, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.instance.tenant = tenant
        self.fields["assignee"].queryset = tenant.agents.all()


MessageFormSet = forms.inlineformset_factory(Case, Message, fields=["text"], extra=1)
