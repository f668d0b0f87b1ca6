"""An application of a project that has our library."""
