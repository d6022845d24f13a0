"""The gateway: an OpenAI-compatible endpoint through which a user's agent talks to the engines of a run."""
