"""The run as a whole: its folder, its checkpoints, requests to stop, and the sharing of devices."""
