"""The algorithm, as pure tensor functions. This package does not import torch.distributed."""
