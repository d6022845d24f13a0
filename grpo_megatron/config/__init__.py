"""Configuration: the schema, and loading it."""
