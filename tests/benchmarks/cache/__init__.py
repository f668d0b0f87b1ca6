"""The cache against the plain ORM, django-cacheops and Yupoo's scheme on Django's cache API."""
