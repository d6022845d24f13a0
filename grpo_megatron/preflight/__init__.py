"""What can be known to be wrong with a run before it starts; may look at every other package."""
