"""Plugins to copy from. A run in this repository names them as `examples.MODULE:FUNCTION`."""
