"""The generating engine. Knows SGLang and what it needs on a machine without a GPU."""
