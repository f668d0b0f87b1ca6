"""The addresses of the site."""

from __future__ import annotations

from django.contrib import admin
from django.contrib.auth.views import LogoutView
from django.templatetags.static import static
from django.urls import include, path
from django.views.generic import RedirectView

from testproject.photos.views import Login

handler404 = "testproject.photos.errors.not_found"
urlpatterns = [
    path("admin/", admin.site.urls),
    path("login/", Login.as_view(), name="login"),
    path("logout/", LogoutView.as_view(), name="logout"),
    # Browsers request it for pages that name no icon, such as those of the admin.
    path("favicon.ico", RedirectView.as_view(url=static("photos/icon.svg"))),
    path("boards/", include("testproject.boards.urls")),
    path("", include("testproject.photos.urls")),
    path("", include("testproject.activity.urls")),
]
