"""The engine's attention and operators on CPUs against SGLang's own torch_native, on SGLang's memory pools.

The functions run in a Ray process, because SGLang chooses its platform by the environment when it is
imported.
"""

import pytest
import ray

from grpo_megatron.config.engine import EngineConfig
from grpo_megatron.sglang.arguments import engine_environment

pytestmark = pytest.mark.slow


def _pools(kv_heads: int, head_dim: int, dtype):
    """Return (request pool, KV pool).

    Free slots hold numbers that would be visible in any result they leak into.
    """
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool

    requests = ReqToTokenPool(size=64, max_context_len=1024, device="cpu", enable_memory_saver=False)
    pool = MHATokenToKVPool(
        4096, 1, dtype, kv_heads, head_dim, layer_num=1, device="cpu", enable_memory_saver=False
    )
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer.fill_(50.0)
    return requests, pool


def _run(backend, requests, pool, kv_heads: int, group: int, head_dim: int, dtype):
    """Return the outputs of a prefill, two decoding steps, and a prefill that hits the cache, with unequal
    lengths.
    """
    from types import SimpleNamespace

    import torch
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    layer = RadixAttention(kv_heads * group, head_dim, head_dim**-0.5, kv_heads, layer_id=0)
    generator = torch.Generator().manual_seed(5)
    free = iter(torch.randperm(4000, generator=generator) + 1)
    lengths = torch.zeros(64, dtype=torch.int64)

    def step(chosen: list[int], new: list[int]):
        mode = ForwardMode.DECODE if max(new) == 1 and lengths[chosen].min() > 0 else ForwardMode.EXTEND
        prefix, new = lengths[chosen].clone(), torch.tensor(new)
        slots = torch.stack([next(free) for _ in range(int(new.sum()))])
        for request, start, part in zip(chosen, prefix.tolist(), slots.split(new.tolist()), strict=True):
            requests.req_to_token[request, start : start + len(part)] = part.int()
        lengths[chosen] += new
        batch = SimpleNamespace(
            forward_mode=mode,
            req_pool_indices=torch.tensor(chosen),
            seq_lens=lengths[chosen],
            extend_prefix_lens=prefix,
            extend_seq_lens=new,
            out_cache_loc=slots,
            encoder_lens=None,
        )
        q, k, v = (
            torch.randn(len(slots), heads, head_dim, generator=generator).to(dtype)
            for heads in (kv_heads * group, kv_heads, kv_heads)
        )
        backend.init_forward_metadata(batch)
        forward = backend.forward_decode if mode == ForwardMode.DECODE else backend.forward_extend
        return forward(q.flatten(1), k, v, layer, batch).float().clone()

    first = [3, 7, 1, 9, 12, 40, 2]
    outputs = {"prefill": step(first, [5, 700, 1, 6, 37, 5, 4])}
    outputs["decode"] = step(first, [1] * 7)
    outputs["decode fewer"] = step([40, 7, 1], [1] * 3)
    outputs["decode alike"] = step([40, 2, 3], [1] * 3)
    # Two more requests on the cached tokens of request 7, one on those of 12, one new, and 7 itself goes on.
    for request, source, cached in ((20, 7, 650), (21, 7, 16), (22, 12, 30)):
        requests.req_to_token[request, :cached] = requests.req_to_token[source, :cached]
        lengths[request] = cached
    outputs["prefill on cache"] = step([20, 50, 21, 22, 7], [2, 9, 600, 1, 33])
    outputs["decode after"] = step([20, 50, 21, 22, 7], [1] * 5)
    return outputs


@ray.remote
def _both(kv_heads: int, group: int, dtype_name: str):
    """Return {step: (largest difference of the two backends, largest value)}."""
    import sglang.srt.model_executor.model_runner  # noqa: F401 - as in the engine: selects the platform
    import torch
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    from grpo_megatron.sglang.without_gpu.platform import ATTENTION_BACKEND

    dtype, results = getattr(torch, dtype_name), []
    for name in (ATTENTION_BACKEND, "torch_native"):
        requests, pool = _pools(kv_heads, 16, dtype)
        runner = type(
            "Runner", (), {"device": "cpu", "req_to_token_pool": requests, "token_to_kv_pool": pool}
        )
        results.append(_run(ATTENTION_BACKENDS[name](runner), requests, pool, kv_heads, group, 16, dtype))
    ours, theirs = results
    return {
        step: (float((ours[step] - theirs[step]).abs().max()), float(theirs[step].abs().max()))
        for step in theirs
    }


@pytest.mark.parametrize(
    ("kv_heads", "group", "dtype", "limit"),
    [(2, 4, "float32", 2e-6), (3, 1, "float32", 2e-6), (2, 2, "bfloat16", 2e-2)],
)
def test_blocks_equal_one_sequence_at_a_time(ray_here, kv_heads, group, dtype, limit):
    environment = engine_environment(EngineConfig(), gpu=False)
    task = _both.options(num_cpus=0, runtime_env={"env_vars": environment})
    differences = ray.get(task.remote(kv_heads, group, dtype))
    assert len(differences) == 6
    for step, (difference, largest) in differences.items():
        assert 0.1 < largest < 10, step  # 50 would be the contents of free slots
        assert difference <= limit, step


@ray.remote
def _operators():
    """Compare our operators with SGLang's native forms.

    Returns {case: (largest difference, largest value, whether ours ran)}, and the result of `_by_column()`.
    """
    import sglang.srt.model_executor.model_runner  # noqa: F401
    import torch
    from sglang.kernels.fused_op import BaseFusedOp
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

    from grpo_megatron.sglang.without_gpu import operators

    generator = torch.Generator().manual_seed(7)
    native = {}

    def compare(case: str, operator: BaseFusedOp, *args):
        found, expected = operator(*args), operator.forward_native(*args)
        found, expected = (x if isinstance(x, tuple) else (x,) for x in (found, expected))
        pairs = list(zip(found, expected, strict=True))
        assert all(a.dtype == b.dtype for a, b in pairs)
        native[case] = (
            max(float((a - b).abs().max()) for a, b in pairs),
            max(float(b.abs().max()) for _, b in pairs),
            operator._resolve_forward_method().__func__.__module__ == operators.__name__,
        )

    norm = RMSNorm(32, eps=1e-5)
    torch.nn.init.uniform_(norm.weight, 0.5, 1.5, generator=generator)
    norm.requires_grad_(False)
    x, residual = (torch.randn(9, 32, generator=generator) for _ in range(2))
    compare("norm", norm, x)
    compare("norm of heads", norm, torch.randn(9, 4, 32, generator=generator))
    compare("norm of a sum", norm, x, residual)
    compare("norm of small numbers", norm, 1e-3 * x)
    compare("norm in bfloat16", norm, x.bfloat16())
    positions = torch.tensor([0, 1, 2, 500, 7, 999, 3, 3, 12])
    for name, rotary_dim, neox in (("whole", 32, True), ("half", 16, True), ("interleaved", 32, False)):
        rotary = RotaryEmbedding(32, rotary_dim, 1000, 10000, neox, torch.float32)
        q, k = (torch.randn(9, heads * 32, generator=generator) for heads in (4, 2))
        compare(f"rotation, {name}", rotary, positions, q, k)
    return native, _by_column()


def _by_column() -> dict:
    """Return what becomes of a linear layer whose weights are stored by column and then loaded again."""
    import torch
    from sglang.srt.layers.linear import ReplicatedLinear

    from grpo_megatron.sglang.without_gpu import operators

    generator = torch.Generator().manual_seed(8)
    layer = ReplicatedLinear(32, 48, bias=False)
    first, second = (torch.randn(48, 32, generator=generator) for _ in range(2))
    x = torch.randn(5, 32, generator=generator)
    weight = layer.weight
    weight.weight_loader(weight, first)
    operators.store_weights(torch.nn.Sequential(layer))
    kept = torch.equal(layer.weight, first)
    weight.weight_loader(weight, second)
    difference = (layer(x)[0] - x @ second.t()).abs().max()
    return {
        "values kept": kept,
        "by column": layer.weight is weight and weight.shape == (48, 32) and weight.t().is_contiguous(),
        "new values used": float(difference) < 1e-5,
    }


@pytest.fixture(scope="module")
def measured(ray_here):
    environment = engine_environment(EngineConfig(), gpu=False)
    return ray.get(_operators.options(num_cpus=0, runtime_env={"env_vars": environment}).remote())


def test_weights_by_column_are_the_same_weights_and_take_new_ones(measured):
    assert all(measured[1].values()), measured[1]


def test_operators_equal_the_native_ones(measured):
    differences = measured[0]
    assert len(differences) == 8
    for case, (difference, largest, ours) in differences.items():
        assert ours, f"{case} did not reach our operator"
        assert difference <= 2e-6 * max(1.0, largest), case
