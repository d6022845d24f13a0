"""The run as a whole: its folder, its checkpoints, its loop of steps, and requests to stop."""
