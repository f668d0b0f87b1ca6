from importlib import import_module

Migration = import_module(
    "tests.integration.testing_support.project.notes.migrations.0001_initial"
).Migration
