"""Fixtures for both sides that the tests of this folder run on: a GPU, and a CPU with emulated kernels.

The assertions are the same on both.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch

from grpo_megatron.capabilities import Capabilities
from grpo_megatron.config.schema import TransformerImpl
from grpo_megatron.model.parallel_sizes import ParallelSizes
from tests.ranks import rank_pool

HERE = Capabilities.of_this_machine()


@dataclass(frozen=True)
class Side:
    """A kind of device that the tests run on.

    layers: implementation of the bf16 model's layers.
    run: calls a function in the process of a rank.
    fp8_problem: why there is no FP8, or None.
    """

    layers: TransformerImpl
    emulated: bool
    run: Callable
    fp8_problem: str | None


def _on_gpu(name: str, problem: str | None):
    problem = problem if torch.cuda.is_available() else "needs CUDA"
    return pytest.param(
        name, marks=[pytest.mark.gpu, pytest.mark.skipif(problem is not None, reason=str(problem))]
    )


@pytest.fixture(
    params=[_on_gpu("cuda-local", None), _on_gpu("cuda-te", HERE.transformer_engine_problem), "emulated-te"],
    scope="package",
)
def side(request) -> Iterator[Side]:
    device, layers = request.param.split("-")
    emulated = device == "emulated"
    layers = TransformerImpl.local if layers == "local" else TransformerImpl.transformer_engine
    problem = (
        "local layers have no FP8"
        if layers == TransformerImpl.local
        else HERE.emulating(emulated).fp8_problem
    )
    with rank_pool(emulated) as pool:
        yield Side(
            layers, emulated, lambda function, *args: pool.run(function, ParallelSizes(), *args)[0], problem
        )
