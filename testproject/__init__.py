"""A photo-sharing site and a film database: an example of a project with shards."""
