"""No URLs: tests that need some override ROOT_URLCONF."""

urlpatterns: list[object] = []
