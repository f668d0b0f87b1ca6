"""The addresses of the site."""

from __future__ import annotations

from django.contrib import admin
from django.contrib.auth import views as auth_views
from django.templatetags.static import static
from django.urls import include, path
from django.views.generic import RedirectView

urlpatterns = [
    path("admin/", admin.site.urls),
    path("login/", auth_views.LoginView.as_view(redirect_authenticated_user=True), name="login"),
    path("logout/", auth_views.LogoutView.as_view(), name="logout"),
    # Browsers ask for it on pages that name no icon, as those of the admin.
    path("favicon.ico", RedirectView.as_view(url=static("photos/icon.svg"))),
    path("", include("testproject.photos.urls")),
]
