"""The addresses of the activity of users."""

from __future__ import annotations

from django.urls import path

from testproject.activity import views

app_name = "activity"
urlpatterns = [
    path("photos/<segment:username>/activity/", views.of_user, name="of_user"),
    path("photos/<segment:username>/activity/around/", views.around_user, name="around_user"),
]
