"""Fixes that Megatron needs if TransformerEngine is not installed, with CUDA or without.

They are written for megatron-core 0.16.1 and 0.19.2. `patches.install` registers them, and the import hook
applies them.
"""

import importlib.util

import torch


class TorchAdam(torch.optim.Optimizer):
    """Adam or AdamW in plain torch, for use instead of FusedAdam if TransformerEngine is not installed.

    It has FusedAdam's interface and state layout, because Megatron's distributed optimizer relies on both.
    The step counter is in the parameter group. The moments of a parameter p are ``state[p]["exp_avg"]`` and
    ``state[p]["exp_avg_sq"]``, with the shape and dtype of p.

    adam_w_mode: True for AdamW (Loshchilov & Hutter 2019), False for Adam (Kingma & Ba 2015).
    capturable: must be False, because a step cannot be captured in a CUDA graph. megatron-core 0.19.2 passes
        this argument.
    """

    def __init__(
        self,
        params,
        lr=1e-3,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0.0,
        adam_w_mode=True,
        capturable=False,
        **unknown,
    ):
        if capturable:
            unknown["capturable"] = capturable
        if unknown:
            raise TypeError(f"TorchAdam does not support the arguments {sorted(unknown)}")
        self.adam_w_mode = adam_w_mode
        super().__init__(
            params,
            {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "bias_correction": True},
        )

    @torch.no_grad()
    def step(self, closure=None):
        from torch.optim._functional import adam, adamw

        update = adamw if self.adam_w_mode else adam
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            params = [p for p in group["params"] if p.grad is not None]
            for p in params:
                if not self.state[p]:
                    self.state[p].update(exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
            update(
                params,
                [p.grad for p in params],
                [self.state[p]["exp_avg"] for p in params],
                [self.state[p]["exp_avg_sq"] for p in params],
                [],
                # torch's function adds one to each counter itself
                [torch.tensor(float(group["step"] - 1)) for _ in params],
                foreach=True,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )


def _absent() -> bool:
    return importlib.util.find_spec("transformer_engine") is None


def _mend_moe_utils(module):
    # megatron-core 0.16.1 leaves this name undefined without TransformerEngine, and the first forward pass of
    # a router fails.
    if not hasattr(module, "te_general_gemm"):
        module.te_general_gemm = None


def _mend_optimizer(module):
    # Megatron's checkpoint code assumes the state of a fused Adam, with `step` in the parameter group. It
    # cannot load states of torch.optim.AdamW into a fresh distributed optimizer.
    if _absent():
        module.Adam = TorchAdam
        module.USING_PYTORCH_OPTIMIZER = False


def _mend_distributed_optimizer(module):
    if _absent():
        module.Adam = TorchAdam
        module.HAVE_APEX_OR_TE = True
        module.USING_TE_OPTIMIZER = True


# {module name: functions that are called with the module right after it is loaded}
MEND = {
    "megatron.core.transformer.moe.moe_utils": [_mend_moe_utils],
    "megatron.core.optimizer": [_mend_optimizer],
    "megatron.core.optimizer.distrib_optimizer": [_mend_distributed_optimizer],
}
