"""An attention backend for SGLang on CPUs that computes the sequences of a batch together.

SGLang's own backend `torch_native` loops over the sequences in Python, in every layer and for every token.
With a hundred running requests these loops take most of a step. The backend in this module groups sequences
of similar length into blocks. It gathers the keys and values of a block into one padded tensor and computes
one block at a time. The results agree with those of `torch_native` up to rounding.

Written for SGLang 0.5.23. Imported only in SGLang's own processes.
"""

from dataclasses import dataclass, field

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch.nn.functional import pad, scaled_dot_product_attention

# A block contains sequences of at least this fraction of its longest one. Lower values waste work on padding,
# higher values make many small blocks.
_BLOCK_RANGE = 0.5
# Number of queries that share one mask. The mask of a whole chunk of a long prompt would take gigabytes.
_MASKED_QUERIES = 512


@dataclass
class Block:
    """A group of n sequences of a batch whose attention is computed together.

    A sequence has up to L tokens. Up to E of them are new, which means that their keys and values were not
    cached before this step.
    """

    rows: torch.Tensor
    """int64 [n, E]: row of each new token in the batch's tensor of queries. A sequence with fewer than E new
    tokens is padded by repeating its last row."""
    real: torch.Tensor
    """int64 [new tokens]: positions in `rows.flatten()` that are not padding."""
    slots: torch.Tensor
    """int64 [n, L]: slot of each token's keys and values in SGLang's pool. Shorter sequences are padded with
    slot 0, which SGLang never uses."""
    lengths: torch.Tensor
    """int64 [n]: number of tokens of each sequence."""
    prefix: torch.Tensor
    """int64 [n]: number of cached tokens of each sequence."""
    _head_slots: dict[int, torch.Tensor] = field(default_factory=dict)
    """Cache of the results of `head_slots`: {heads: result}."""
    _padding: dict[tuple[int, int | None], torch.Tensor] = field(default_factory=dict)
    """Cache of the results of `padding`: {(heads, window): result}."""

    def head_slots(self, heads: int) -> torch.Tensor:
        """Return the positions of the block's keys (or values) in SGLang's pool, int64 [n * heads * L].

        The positions are ordered by sequence, then by head, then by token. They are rows of the pool viewed
        as [slots * heads, head_dim], so that one index_select gathers all keys of the block. The result is
        computed once per batch and used in every layer.

        heads: number of KV heads.
        """
        if heads not in self._head_slots:
            self._head_slots[heads] = (self.slots[:, None] * heads + torch.arange(heads)[:, None]).flatten()
        return self._head_slots[heads]

    def padding(self, heads: int, window: int | None = None) -> torch.Tensor:
        """Return the additive attention mask of each sequence's last token, float32 [n * heads, 1, L].

        It is -inf after the sequence's end and before the sliding window, and else 0. The mask is computed
        once per batch and used in every layer.

        heads: number of KV heads.
        window: number of tokens before the last one that it sees; None: all of them.
        """
        key = heads, window
        if key not in self._padding:
            position, end = torch.arange(self.slots.shape[1]), self.lengths[:, None]
            hidden = position >= end
            if window is not None:
                hidden |= position < end - 1 - window
            once = torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf)
            self._padding[key] = once.repeat_interleave(heads, dim=0)[:, None]
        return self._padding[key]


def make_blocks(
    req_to_token: torch.Tensor, requests: torch.Tensor, lengths: torch.Tensor, prefix: torch.Tensor
) -> list[Block]:
    """Partition a batch into blocks of sequences of similar length, so that little is computed on padding.

    The sequences of a block have similar numbers of tokens and of new tokens. Either all of them have a
    cached prefix, or none has one.

    req_to_token: int32 [requests, context], slot of each token of each request in SGLang's pool.
    requests: int64 [B], row of each sequence in `req_to_token`.
    lengths: int64 [B], number of tokens of each sequence, cached tokens included.
    prefix: int64 [B], number of cached tokens of each sequence. The batch contains the queries of the other
        tokens, sequence by sequence.
    """
    new = lengths - prefix
    starts = new.cumsum(0) - new
    alike = all(int(size.min()) >= _BLOCK_RANGE * int(size.max()) for size in (new, lengths))
    if alike and len((prefix > 0).unique()) == 1:  # most decoding steps
        return [_block(req_to_token, requests, lengths, prefix, starts)]
    sizes = list(zip((prefix > 0).tolist(), new.tolist(), lengths.tolist(), strict=True))
    blocks = []
    pending = sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True)
    while pending:
        cached, most_new, _ = sizes[pending[0]]
        candidates = [i for i in pending if sizes[i][0] == cached and sizes[i][1] >= _BLOCK_RANGE * most_new]
        longest = max(sizes[i][2] for i in candidates)
        chosen = {i for i in candidates if sizes[i][2] >= _BLOCK_RANGE * longest}
        pending = [i for i in pending if i not in chosen]
        members = torch.tensor(sorted(chosen))
        blocks.append(
            _block(req_to_token, requests[members], lengths[members], prefix[members], starts[members])
        )
    return blocks


def _block(req_to_token, requests, lengths, prefix, starts) -> Block:
    new = lengths - prefix
    position = torch.arange(int(lengths.max()))
    slots = torch.where(position < lengths[:, None], req_to_token[requests, : len(position)].long(), 0)
    query = torch.arange(int(new.max()))
    rows = starts[:, None] + torch.minimum(query, new[:, None] - 1)
    real = (query < new[:, None]).flatten().nonzero()[:, 0]
    return Block(rows, real, slots, lengths, prefix)


@dataclass(frozen=True)
class Scores:
    """Settings of a layer's attention scores.

    scale: factor of the scores before the softmax.
    window: number of tokens before a token that it sees; None: all of them.
    sinks: float [heads], a further score in the softmax of each head, of a key without a value; None: there
        is none.
    """

    scale: float
    window: int | None = None
    sinks: torch.Tensor | None = None


def decode_attention(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, block: Block, settings: Scores
) -> torch.Tensor:
    """Return the attention of one new token per sequence (decoding), float32 [n, heads, v_dim].

    q: [n, heads, d], the queries.
    keys: [slots, kv_heads, d], SGLang's whole pool of cached keys.
    values: [slots, kv_heads, v_dim], SGLang's whole pool of cached values.
    settings: settings of the layer's attention scores.

    Everything is computed in float32. The query heads that share a KV head are the rows of one matrix
    product.
    """
    n, heads, d = q.shape
    kv_heads = keys.shape[1]
    index = block.head_slots(kv_heads)

    def gathered(pool: torch.Tensor) -> torch.Tensor:
        return (
            pool.view(-1, pool.shape[-1])
            .index_select(0, index)
            .view(n * kv_heads, -1, pool.shape[-1])
            .float()
        )

    grouped = q.float().view(n * kv_heads, heads // kv_heads, d)
    mask = block.padding(kv_heads, settings.window)
    scores = torch.baddbmm(mask, grouped, gathered(keys).transpose(1, 2), alpha=settings.scale)
    if settings.sinks is None:
        shares = scores.softmax(dim=-1)
    else:
        sinks = settings.sinks.float().view(kv_heads, -1, 1).repeat(n, 1, 1)
        shares = torch.cat([scores, sinks], dim=-1).softmax(dim=-1)[..., :-1]
    return torch.bmm(shares, gathered(values)).view(n, heads, -1)


def extend_attention(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, block: Block, settings: Scores
) -> torch.Tensor:
    """Return the causal attention of all new tokens (prefill), [n, E, heads, v_dim] in the queries' dtype.

    q: [n, E, heads, d], the queries, padded at the end of each sequence.
    keys: [slots, kv_heads, d], SGLang's whole pool of cached keys.
    values: [slots, kv_heads, v_dim], SGLang's whole pool of cached values.
    settings: settings of the layer's attention scores.
    """
    n, length = block.slots.shape
    flat = block.slots.flatten()
    # Gather before the cast, because the pool may have a smaller dtype than the queries.
    k, v = (
        pool.index_select(0, flat).view(n, length, *pool.shape[1:]).transpose(1, 2).to(q.dtype)
        for pool in (keys, values)
    )
    q = q.transpose(1, 2)
    if not block.prefix.any() and settings.window is None and settings.sinks is None:
        # Padding follows the real tokens of a sequence, so the causal mask hides it.
        return scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=settings.scale, enable_gqa=True
        ).transpose(1, 2)
    if settings.sinks is not None:  # a key and a value of zero; the mask then adds the head's number
        k, v = (pad(x, (0, 0, 0, 1)) for x in (k, v))
    parts = []
    for start in range(0, q.shape[2], _MASKED_QUERIES):
        part = q[:, :, start : start + _MASKED_QUERIES]
        mask = _mask(block, start, part, settings)
        parts.append(
            scaled_dot_product_attention(part, k, v, attn_mask=mask, scale=settings.scale, enable_gqa=True)
        )
    return torch.cat(parts, dim=2).transpose(1, 2)


def _mask(block: Block, start: int, queries: torch.Tensor, settings: Scores) -> torch.Tensor:
    """Return the mask of some of a block's queries: bool [n, 1, q, L], or with sinks [n, heads, q, L + 1].

    start: position of the first of these queries among the new tokens of a sequence.
    queries: [n, heads, q, d]. Its dtype is that of a mask with sinks.
    """
    position = (block.prefix[:, None] + torch.arange(start, start + queries.shape[2]))[:, :, None]
    key = torch.arange(block.slots.shape[1])
    seen = key <= position
    if settings.window is not None:
        seen &= key >= position - settings.window
    if settings.sinks is None:
        return seen[:, None]
    added = torch.zeros(seen.shape, dtype=queries.dtype).masked_fill_(~seen, -torch.inf)
    sinks = settings.sinks.to(queries.dtype).view(1, -1, 1, 1).expand(*queries.shape[:3], 1)
    return torch.cat([added[:, None].expand(-1, queries.shape[1], -1, -1), sinks], dim=-1)


class BatchedAttention(TorchNativeAttnBackend):
    """The attention backend of CPU engines. It computes attention for blocks of similar sequences at once.

    The base class, SGLang's backend `torch_native`, computes one sequence at a time. The base class is still
    used for cross-attention and encoders, which the models of this project do not have.
    """

    def init_forward_metadata(self, forward_batch):
        super().init_forward_metadata(forward_batch)
        lengths = forward_batch.seq_lens.long()
        decoding = forward_batch.forward_mode.is_decode()
        prefix = lengths - 1 if decoding else forward_batch.extend_prefix_lens.long()
        self._blocks = make_blocks(
            self.req_to_token_pool.req_to_token, forward_batch.req_pool_indices.long(), lengths, prefix
        )

    def _is_plain(self, layer) -> bool:
        return not (layer.is_cross_attention or layer.attn_type == AttentionType.ENCODER_ONLY)

    @staticmethod
    def _scores(layer, sinks) -> Scores:
        window = layer.sliding_window_size
        return Scores(layer.scaling, None if window is None or window < 0 else window, sinks)

    def _store(self, layer, forward_batch, k, v, save_kv_cache: bool):
        if save_kv_cache and k is not None and v is not None:
            location = KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc)
            self.token_to_kv_pool.set_kv_buffer(layer, location, k, v)
        pool = self.token_to_kv_pool
        return pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, sinks=None):
        if not self._is_plain(layer):
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)
        keys, values = self._store(layer, forward_batch, k, v, save_kv_cache)
        scores = self._scores(layer, sinks)
        q = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        out = q.new_empty(q.shape[0], layer.tp_q_head_num, layer.v_head_dim)
        for block in self._blocks:
            rows = block.rows.flatten()
            queries = q.index_select(0, rows).view(*block.rows.shape, *q.shape[1:])
            attended = extend_attention(queries, keys, values, block, scores).flatten(0, 1)
            out[rows[block.real]] = attended[block.real]
        return out.flatten(1)

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True, sinks=None):
        if not self._is_plain(layer):
            return super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache)
        keys, values = self._store(layer, forward_batch, k, v, save_kv_cache)
        scores = self._scores(layer, sinks)
        q = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        if len(self._blocks) == 1:  # the block is the whole batch in its order
            return decode_attention(q, keys, values, self._blocks[0], scores).to(q.dtype).flatten(1)
        out = q.new_empty(q.shape[0], layer.tp_q_head_num, layer.v_head_dim)
        for block in self._blocks:
            rows = block.rows[:, 0]
            out[rows] = decode_attention(q.index_select(0, rows), keys, values, block, scores).to(q.dtype)
        return out.flatten(1)
