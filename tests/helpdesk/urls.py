from __future__ import annotations

from django.contrib import admin
from django.contrib.auth.views import LoginView
from django.contrib.sitemaps import views as sitemap_views
from django.urls import include, path

from tests.helpdesk import api, views
from tests.helpdesk.sitemaps import sitemaps

urlpatterns = [
    path("admin/", admin.site.urls),
    path("<int:tenant>/", views.CaseList.as_view(), name="cases"),
    path("<int:tenant>/overview/", views.overview),
    path("<int:tenant>/filter/", views.CaseFilterView.as_view(), name="cases-filtered"),
    path("<int:tenant>/cases/new/", views.CaseCreate.as_view(), name="case-new"),
    path("<int:tenant>/cases/<int:pk>/", views.CaseDetail.as_view(), name="case"),
    path("<int:tenant>/cases/<int:pk>/edit/", views.CaseUpdate.as_view(), name="case-edit"),
    path("<int:tenant>/cases/<int:pk>/delete/", views.CaseDelete.as_view(), name="case-delete"),
    path("login/", LoginView.as_view(template_name="helpdesk/login.html"), name="login"),
    path("me/", views.ProfileUpdate.as_view(), name="profile"),
    path("sitemap.xml", sitemap_views.index, {"sitemaps": sitemaps}),
    path(
        "sitemap-<section>.xml",
        sitemap_views.sitemap,
        {"sitemaps": sitemaps},
        name="django.contrib.sitemaps.views.sitemap",
    ),
    path("__debug__/", include("debug_toolbar.urls")),
    path("api/<int:tenant>/", include(api.router.urls)),
    path("api/staff/", include(api.staff.urls)),
]
