"""Facts about a model and its parallel layout, shared by the trainer, the engines and the planner."""
