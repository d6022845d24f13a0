"""The driver's side of training: all ranks behind one object."""
