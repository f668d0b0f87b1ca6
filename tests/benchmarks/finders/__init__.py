"""The application of the models with lookups."""
