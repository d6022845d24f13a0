"""The counter of host synchronisations sees what it claims to see."""

import warnings

import numpy as np
import pytest
import torch

from tests.host_syncs import CudaSyncs, HostSyncs, difference

VALUES = torch.arange(6.0)
MASK = VALUES > 2


class Careless(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * float(grad.sum())


WAITING = {
    "item": lambda: VALUES[0].item(),
    "bool": lambda: bool(MASK.any()),
    "float": lambda: float(VALUES.sum()),
    "index": lambda: [0, 1][VALUES[1].long()],
    "cpu": lambda: VALUES.cpu(),
    "numpy": lambda: VALUES.numpy(),
    "array": lambda: np.asarray(VALUES),
    "tolist": lambda: VALUES.tolist(),
    "mask": lambda: VALUES[MASK],
    "put": lambda: VALUES.clone().index_put_((MASK,), VALUES[:3]),
    "nonzero": lambda: MASK.nonzero(),
    "where": lambda: torch.where(MASK),
    "select": lambda: torch.masked_select(VALUES, MASK),
    "unique": lambda: torch.unique(VALUES),
    "bincount": lambda: torch.bincount(VALUES.long()),
    "equal": lambda: torch.equal(VALUES, VALUES),
    "repeat": lambda: torch.repeat_interleave(torch.tensor([1, 2])),
    "numbers": lambda: torch.tensor(1.0, device="cpu"),
    "array to the device": lambda: torch.from_numpy(np.zeros(3)).to("cpu"),
    "array to the device by name": lambda: torch.from_numpy(np.zeros(3)).to(device=torch.device("cpu")),
    "backward": lambda: Careless.apply(VALUES.clone().requires_grad_()).sum().backward(),
}
NOT_WAITING = {
    "arithmetic": lambda: (VALUES * 2).sum(),
    "fill": lambda: VALUES.clone().index_put_((MASK,), torch.tensor(0.0)),
    "assign": lambda: VALUES.clone().__setitem__(MASK, 0.0),
    "choose": lambda: torch.where(MASK, VALUES, 0.0),
    "rows": lambda: VALUES[MASK.long()],
    "cast": lambda: VALUES.to(torch.float64),
    "already there": lambda: torch.arange(6.0).to("cpu"),
    "array": lambda: torch.from_numpy(np.zeros(3)).to("cpu", non_blocking=True),
    "backward": lambda: (VALUES.clone().requires_grad_() * 2).sum().backward(),
}


@pytest.mark.parametrize("name", WAITING)
def test_what_waits_is_seen_once_and_where(name):
    with HostSyncs() as syncs:
        WAITING[name]()
    assert len(syncs.found) == 1, syncs.found
    assert __file__ in syncs.found[0]


@pytest.mark.parametrize("name", NOT_WAITING)
def test_what_does_not_wait_is_not_seen(name):
    with HostSyncs() as syncs:
        NOT_WAITING[name]()
    assert syncs.found == []


def test_nothing_is_seen_outside_and_all_is_as_it_was():
    before = torch.Tensor.cpu, torch.tensor
    with HostSyncs() as syncs:
        pass
    assert VALUES.cpu().tolist() == list(range(6))
    assert syncs.found == []
    assert (torch.Tensor.cpu, torch.tensor) == before


def test_the_difference_of_two_counts():
    assert difference(["a", "a", "b"], ["a", "a", "a", "c", "b"]) == ["1 x a", "1 x c"]


def test_what_torch_says_of_a_gpu_is_counted_each_time(monkeypatch):
    """torch reports it in a warning, which Python shows only once per line."""
    modes, before = [], warnings.showwarning
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    with CudaSyncs() as syncs:
        for _ in range(2):
            warnings.warn("called a synchronizing CUDA operation (Triggered internally at ...)", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
    assert modes == ["warn", "default"]
    assert len(syncs.found) == 2
    assert __file__ in syncs.found[0]
    assert warnings.showwarning is before
