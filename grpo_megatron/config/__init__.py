"""Configuration: the schema, and the code that loads it."""
