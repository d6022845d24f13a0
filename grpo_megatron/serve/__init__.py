"""`grpo-megatron serve`: a server with the wire of the Tinker API, for one client and one model.

It speaks the wire of the SDK `tinker` 0.38.0. All requests work on one `grpo_megatron.api.Session`, one after
the other.
"""
