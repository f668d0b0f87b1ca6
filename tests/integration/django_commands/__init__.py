"""Each command of Django, run in a project with shards."""
