"""The filter of the panel."""

from __future__ import annotations

from django import template

register = template.Library()


@register.filter
def milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.1f}"
