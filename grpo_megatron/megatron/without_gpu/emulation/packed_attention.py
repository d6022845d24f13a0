"""Emulated cuDNN attention over packs, and emulated kernels of ring attention (context parallelism).

Each public function replaces the function of the same name in TransformerEngine's compiled extension. Like
the real kernel, the emulation refuses float32 and writes no softmax statistics for padding rows, which belong
to no sequence. Their statistics are `PADDING_STATISTICS`. Tests set it to NaN to find code that reads them.

The softmax statistics of a row are the log of its softmax denominator (log-sum-exp of the row's scores).
"""

from itertools import pairwise

import torch

from grpo_megatron.megatron.without_gpu.emulation.extension import FusedAttentionBackend, MaskType

# Softmax statistics of rows that belong to no sequence. The real kernel leaves their memory as it was.
PADDING_STATISTICS = 0.0


def get_fused_attn_backend(*args):
    return FusedAttentionBackend.NVTE_F16_arbitrary_seqlen


def _sequences(cu, cu_padded, cu_keys, cu_keys_padded):
    """Return where each sequence lies in a pack: a list of (slice of its query rows, slice of its key rows).

    Sequences without queries or without keys are left out.

    cu, cu_keys: cumulative lengths of the queries and of the keys, without padding.
    cu_padded, cu_keys_padded: cumulative lengths with padding. None: there is no padding.
    """
    both = []
    for ends, padded in ((cu, cu_padded), (cu_keys, cu_keys_padded)):
        starts = (ends if padded is None else padded)[:-1].tolist()
        both.append(
            [
                slice(start, start + n)
                for start, n in zip(starts, (ends[1:] - ends[:-1]).tolist(), strict=True)
            ]
        )
    return [(q, k) for q, k in zip(*both, strict=True) if q.stop > q.start and k.stop > k.start]


def _is_causal(mask) -> bool:
    if mask not in (MaskType.NVTE_PADDING_CAUSAL_MASK, MaskType.NVTE_PADDING_MASK):
        raise NotImplementedError(f"attention with {mask!r} is not emulated")
    return mask == MaskType.NVTE_PADDING_CAUSAL_MASK


def _scores(query, key, scale: float, causal: bool) -> torch.Tensor:
    """Return the attention scores of one sequence, [heads, q, k]: scale times query times key.

    query: [q, heads, d]. key: [k, kv_heads, d]. Several query heads may share one key head.
    causal: if True, query i sees only the keys 0 to i. The scores of later keys are -inf.
    """
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    if causal:  # the mask is aligned to the top left
        scores = scores.masked_fill(torch.ones(scores.shape[1:], dtype=torch.bool).triu(1), -torch.inf)
    return scores


def fused_attn_fwd(
    max_q, max_kv, training, scale, dropout, fast_zero_fill, layout, bias_type, mask, softmax_type, window,
    cu_q, cu_kv, query, key, value, dtype, cu_q_padded, cu_kv_padded, *rest,
):  # fmt: skip
    """Compute attention over a pack of sequences, as cuDNN's fused kernel does.

    query: [t, heads, d]. key, value: [rows, kv_heads, d].
    cu_q, cu_kv: cumulative sequence lengths of queries and keys, without padding.
    cu_q_padded, cu_kv_padded: cumulative sequence lengths with padding. None: there is no padding.

    Returns [output, statistics, random state]. The statistics are the log of each row's softmax denominator,
    float32 [t, heads, 1]. The random state is zeros, because dropout is not emulated.
    """
    if query.dtype not in (torch.bfloat16, torch.float16):
        raise RuntimeError(f"fused attention needs bf16 or fp16, got {query.dtype}")
    heads, causal = query.shape[1], _is_causal(mask)
    output = torch.zeros(*query.shape[:-1], value.shape[-1], dtype=query.dtype)
    statistics = torch.full((len(query), heads, 1), PADDING_STATISTICS)
    for q, k in _sequences(cu_q, cu_q_padded, cu_kv, cu_kv_padded):
        if q.stop - q.start > max_q or k.stop - k.start > max_kv:
            raise RuntimeError(f"a sequence is longer than max_q={max_q} or max_kv={max_kv}")
        scores = _scores(query[q].float(), key[k].float(), scale, causal)
        sums = torch.logsumexp(scores, -1)
        values = value[k].float().repeat_interleave(heads // value.shape[1], 1)
        output[q] = torch.einsum("hqk,khd->qhd", (scores - sums[..., None]).exp(), values).to(output.dtype)
        statistics[q, :, 0] = sums.t()
    return [output, statistics, torch.zeros(2, dtype=torch.int64)]


def fused_attn_bwd(
    max_q, max_kv, scale, dropout, fast_zero_fill, layout, bias_type, mask, softmax_type, window,
    deterministic, cu_q, cu_kv, query, key, value, output, grad, dtype, grad_dtype, auxiliary, cu_q_padded,
    cu_kv_padded, *rest,
):  # fmt: skip
    """Compute the backward pass of fused_attn_fwd.

    grad: gradient of `output`.
    auxiliary: list whose first tensor is the softmax statistics that fused_attn_fwd returned.

    Returns [gradient of the query, gradient of the key, gradient of the value, None, None].
    """
    statistics, causal = auxiliary[0], _is_causal(mask)
    statistics = statistics[..., None] if statistics.dim() == 2 else statistics
    of_query, of_key, of_value = (torch.zeros_like(tensor) for tensor in (query, key, value))
    shared = query.shape[1] // key.shape[1]
    for q, k in _sequences(cu_q, cu_q_padded, cu_kv, cu_kv_padded):
        queries, keys, values, outputs, grads = (
            x.float() for x in (query[q], key[k], value[k], output[q], grad[q])
        )
        share = (_scores(queries, keys, scale, causal) - statistics[q, :, 0].t()[..., None]).exp()
        of_values = torch.einsum("hqk,qhd->khd", share, grads)
        of_share = torch.einsum("qhd,khd->hqk", grads, values.repeat_interleave(shared, 1))
        of_scores = share * (of_share - (grads * outputs).sum(-1).t()[..., None]) * scale
        of_query[q] = torch.einsum("hqk,khd->qhd", of_scores, keys.repeat_interleave(shared, 1)).to(
            query.dtype
        )
        of_keys = torch.einsum("hqk,qhd->khd", of_scores, queries)
        of_key[k] = _sum_of_heads(of_keys, shared).to(key.dtype)
        of_value[k] = _sum_of_heads(of_values, shared).to(value.dtype)
    return [of_query, of_key, of_value, None, None]


def _sum_of_heads(grads: torch.Tensor, shared: int) -> torch.Tensor:
    return grads.unflatten(1, (-1, shared)).sum(2)


# --- context parallelism: a rank holds two chunks of each sequence, one of each half


def _half(cu_seqlens, which: int) -> torch.Tensor:
    """Return the row indices of the first (which=0) or second (which=1) half of each sequence, in one tensor.

    Under context parallelism, a rank has two chunks of each sequence, which are these halves.

    cu_seqlens: cumulative lengths of the sequences on this rank.
    """
    ends = cu_seqlens.tolist()
    parts = [
        torch.arange(start + (end - start) // 2 * which, start + (end - start) // 2 * (which + 1))
        for start, end in pairwise(ends)
    ]
    return torch.cat(parts)


def thd_read_half_tensor(tensor, cu_seqlens, half):
    """Return the rows of the first (half=0) or second (half=1) half of each sequence.

    tensor: [t, heads, d], or keys and values together, [2, t, heads, d].
    cu_seqlens: cumulative lengths of the sequences.
    """
    return tensor.index_select(0 if tensor.dim() == 3 else 1, _half(cu_seqlens, half))


def thd_get_partitioned_indices(cu_seqlens, total, world, rank):
    """Return which rows of the whole pack a CP rank holds, as int32 indices.

    Each sequence is cut into 2 * world chunks. The rank holds the chunks rank and 2 * world - 1 - rank.

    world, rank: size of the CP group, and the rank's index in it.
    """
    rows, ends = [], cu_seqlens.tolist()
    for start, end in pairwise(ends):
        chunk = (end - start) // (2 * world)
        rows.append(torch.arange(start + chunk * rank, start + chunk * (rank + 1)))
        rows.append(torch.arange(end - chunk * (rank + 1), end - chunk * rank))
    return torch.cat(rows).int()


def thd_second_half_lse_correction(statistics, of_step, cu_seqlens, packed):
    """Update softmax statistics in place after a step of ring attention that computed only second halves.

    After the update, the rows of each sequence's second half also count the keys of this step.

    statistics: [heads, t], log of each row's softmax denominator over the keys of all earlier steps.
    of_step: [heads, rows of the second halves], log of the softmax denominator over this step's keys.
    """
    rows = _half(cu_seqlens, 1)
    statistics[:, rows] = torch.logaddexp(statistics[:, rows], of_step[:, : len(rows)])


def thd_read_second_half_lse(statistics, cu_seqlens, packed, length):
    rows = _half(cu_seqlens, 1)
    read = torch.zeros(len(statistics), length, dtype=statistics.dtype)
    read[:, : len(rows)] = statistics[:, rows]
    return read


def thd_out_correction(output, of_step, statistics, statistics_of_step, cu_seqlens, only_second_half, packed):
    """Add the attention output of one step of ring attention to the total output, in place.

    The step's output is weighted by the share of the step's keys in the softmax over all keys.

    output: total output, [t, heads, d].
    of_step: output of this step, over its own keys only.
    statistics: [heads, t], log of each row's softmax denominator over all keys.
    statistics_of_step: the same over this step's keys.
    only_second_half: if True, the step computed only the second half of each sequence.
    """
    rows = _half(cu_seqlens, 1) if only_second_half else torch.arange(len(output))
    part = of_step.view(-1, *output.shape[1:])[: len(rows)].float()
    share = torch.exp(statistics_of_step[:, : len(rows)] - statistics[:, rows]).t()[..., None]
    output[rows] = (output[rows].float() + part * share).to(output.dtype)


def thd_grad_correction(grad, of_step, cu_seqlens, first, second):
    """Add the gradient of one step of ring attention to `grad`, or copy it over `grad`, in place.

    of_step: gradient of this step. It has no rows for a half that is "none" below.
    first, second: treatment of the first and of the second half of each sequence: "add" the step's gradient,
        "copy" it over `grad`, or "none" (leave `grad` as it is).
    """
    both = "none" not in (first, second)
    for half, how in enumerate((first, second)):
        if how == "none":
            continue
        rows = _half(cu_seqlens, half)
        part = of_step[rows] if both else of_step[: len(rows)]
        if how == "add":
            part = grad[rows].float() + part.float()
        grad[rows] = part.to(grad.dtype)
