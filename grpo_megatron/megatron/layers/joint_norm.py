"""RMS norm over all heads of queries or keys together, as in MiniMax-M2."""

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint


class JointRMSNorm(torch.nn.Module):
    """RMS norm over all heads of queries or keys together. TP divides the heads and the weight.

    forward: takes x [t, 1, heads / tp, d] and returns the same shape. The sum of squares is added up over TP.
    heads: number of heads on all TP ranks together.
    """

    def __init__(self, config, hidden_size: int, eps: float, heads: int):
        super().__init__()
        self.group = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp"]).tp
        self.eps, self.size = eps, heads * hidden_size
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        weight = torch.ones(self.size // self.group.size(), dtype=config.params_dtype, device=device)
        self.weight = torch.nn.Parameter(weight)
        set_tensor_model_parallel_attributes(self.weight, True, 0, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = x.float()
        squares = values.square().sum(dim=(-2, -1), keepdim=True)
        # The output of every rank depends on this sum, so its gradient is summed over the ranks too.
        squares = reduce_from_tensor_model_parallel_region(squares, group=self.group)
        squares = copy_to_tensor_model_parallel_region(squares, group=self.group)
        scale = torch.rsqrt(squares / self.size + self.eps)
        return (values * scale * self.weight.float().view(x.shape[-2:])).to(x.dtype)

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        groups = {"tp_group": self.group, "dp_cp_group": metadata["dp_cp_group"]}
        state = self.state_dict(keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, {"weight": 0}, sharded_offsets, **groups)


class JointNormAttention(SelfAttention):
    """Megatron's self-attention with one norm over all query heads, and one over all key heads.

    Megatron's option for norms of single heads must be off. With it, Megatron would add up the gradients of
    these norms over TP.
    """

    def __init__(self, config, *positional, **named):
        super().__init__(config, *positional, **named)
        of_head = config, self.hidden_size_per_attention_head, config.layernorm_epsilon
        self.q_layernorm = JointRMSNorm(*of_head, config.num_attention_heads)
        self.k_layernorm = JointRMSNorm(*of_head, config.num_query_groups)
