import multiprocessing
import os
import sys

from django.core.management import execute_from_command_line

os.environ.setdefault(
    "DJANGO_SETTINGS_MODULE", "tests.integration.testing_support.project.settings"
)

if __name__ == "__main__":
    if method := os.environ.get("PROJECT_START_METHOD"):
        multiprocessing.set_start_method(method)
    execute_from_command_line(sys.argv)
