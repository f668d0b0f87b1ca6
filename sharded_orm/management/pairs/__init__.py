"""The actions of ``manage.py pairs``."""
