"""Driver side of training: all ranks behind one object."""
