"""What a run tells about itself."""

from grpo_megatron.monitor.monitor import Monitor

__all__ = ["Monitor"]
