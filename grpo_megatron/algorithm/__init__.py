"""The RL algorithm (advantages, losses, corrections) as pure tensor functions without torch.distributed."""
