"""Several fake devices in one process, and what of the project runs on them."""
