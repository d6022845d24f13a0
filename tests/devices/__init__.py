"""Tests of the project's code with several fake devices in one process."""
