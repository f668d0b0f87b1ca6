"""The debug panel. It shows data that only the library knows.

The SQL panel of django-debug-toolbar looks at the connections that Django iterates over, and
shards are not among them. It does not know nodes, scattered reads and two levels of cache. So its
panel would have to be written here all the same, and a page of HTML needs no toolbar.
"""

from __future__ import annotations

from django.apps import AppConfig


class PanelConfig(AppConfig):
    name = "testproject.panel"
