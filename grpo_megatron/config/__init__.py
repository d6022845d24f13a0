"""The configuration: its schema, and the code that loads it."""
