"""Driver side of training: objects with which the driver process controls all trainer ranks."""
