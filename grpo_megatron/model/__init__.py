"""Facts about a model and its parallel layout, used by the trainer, the engines and the planner."""
