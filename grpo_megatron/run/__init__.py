"""What a run writes: its folder and its checkpoints; and whose turn it is."""
