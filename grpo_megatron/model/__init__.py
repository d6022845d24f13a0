"""Facts about a model and its layout that trainer, engines and planners share."""
