"""Driver side of training: objects through which the driver process controls all trainer ranks."""
