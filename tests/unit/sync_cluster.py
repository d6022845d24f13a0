"""Trainer and engine ranks as threads of one process, which exchange weights over real transports."""

import dataclasses
import threading

import torch

from grpo_megatron.cluster.store import StoreServer
from grpo_megatron.config.weight_sync import Transport
from grpo_megatron.model.architecture import Architecture, MoE
from grpo_megatron.model.entries import EngineLayout
from grpo_megatron.model.families import weight_map
from grpo_megatron.model.parallel_sizes import ParallelSizes
from grpo_megatron.model.pieces import box
from grpo_megatron.weights.sync.messages import SyncCommand, SyncKind, SyncSetup
from grpo_megatron.weights.sync.plan import Layouts, ReshardPlan
from grpo_megatron.weights.sync.ranks import TrainerRanks
from grpo_megatron.weights.sync.receiver import WeightReceiver
from grpo_megatron.weights.sync.sender import WeightSender

TRANSPORTS = [transport for transport in Transport if transport != Transport.auto]
DENSE = Architecture(
    family="qwen2",
    num_layers=4,
    hidden_size=16,
    ffn_hidden_size=24,
    num_heads=8,
    num_kv_heads=2,
    head_dim=6,
    vocab_size=61,
    max_positions=64,
    rope_theta=1e4,
    rope_scaling=None,
    norm_eps=1e-6,
    qk_norm=False,
    qkv_bias=True,
    tied_embeddings=False,
    dtype=torch.float32,
)
EXPERTS = dataclasses.replace(
    DENSE, family="qwen3_moe", qkv_bias=False, qk_norm=True, moe=MoE(4, 2, 8, True, (True, False, True, True))
)


def hf_tensors(arch, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        hf: torch.randn(shape, generator=generator)
        for entry in weight_map(arch).values()
        for hf, shape in zip(entry.hf, entry.shapes, strict=True)
    }


def trainer_parameters(plan, tensors):
    """Return {rank: {Megatron name: its shard}}, as loading would fill them."""
    ranks = TrainerRanks(plan.layouts.sizes, plan.layouts.arch.num_layers)
    found = {rank: {} for rank in range(plan.layouts.sizes.world_size)}
    for entry in plan.entries:
        parts = ranks.shards(entry)
        for shard in range(parts):
            for rank in ranks.holders(entry, shard):
                # Several entries may have parts of one parameter.
                local = found[rank].setdefault(entry.megatron, torch.zeros(entry.megatron_shape(parts)))
                for piece in entry.megatron_pieces(parts, shard):
                    piece.of(local).copy_(tensors[piece.hf][box(piece.start, piece.shape)])
    return found


def engine_parameters(plan, tensors=None, dtypes=None):
    """Return {engine rank: {name: parameter}} with the HF tensors, or NaN where nothing was written.

    dtypes: dtypes by name; otherwise float32.
    """
    found = {}
    for me in plan.engine_ranks:
        own = {
            name: torch.full(shape, torch.nan, dtype=dtypes[name] if dtypes else torch.float32)
            for name, shape in plan.engine_shapes.items()
        }
        for entry in plan.entries if tensors else ():
            for piece in entry.engine_pieces(plan.layouts.engine, me.rank):
                piece.of(own[entry.engine]).copy_(tensors[piece.hf][box(piece.start, piece.shape)])
        found[me] = own
    return found


class Cluster:
    """Every rank of the trainer and of the engines as a thread, with its own sender or receiver."""

    def __init__(
        self, layouts, transport, folder="", bucket_bytes=700, timeout=10.0, delta=False, dtype=torch.float32
    ):
        self.server = StoreServer("127.0.0.1", timeout=30)
        self.plan = ReshardPlan(layouts)
        dtypes = {name: self.dtype(name, dtype) for name in self.plan.engine_shapes}
        self.setup = SyncSetup(
            layouts,
            transport,
            self.server.address,
            bucket_bytes,
            timeout,
            tuple(dtypes.items()),
            str(folder),
            delta,
        )
        self.arrived = engine_parameters(self.plan, dtypes=dtypes)
        made = self.on_all(
            lambda rank: WeightSender(self.setup, rank, self.device_of(rank)),
            lambda me: WeightReceiver(self.setup, me, self.device_of(me)),
        )
        self.senders = {rank: made[rank] for rank in range(layouts.sizes.world_size)}
        self.receivers = {me: made[me] for me in self.plan.engine_ranks}
        self.sync_id = 0

    def dtype(self, name, of_engine):
        return of_engine

    def device_of(self, rank):
        """Return the device of the parameters of a trainer rank or an EngineRank."""
        return torch.device("cpu")

    def trainer_parameters(self, tensors):
        return trainer_parameters(self.plan, tensors)

    def on_all(self, of_trainer, of_engine, without=()):
        """Run a function on all ranks and return {rank: result}. Raises the first exception."""
        results, errors = {}, []

        def run(key, function):
            try:
                results[key] = function(key)
            except Exception as error:
                errors.append(error)

        calls = [(rank, of_trainer) for rank in range(self.plan.layouts.sizes.world_size)]
        calls += [(me, of_engine) for me in self.plan.engine_ranks]
        threads = [threading.Thread(target=run, args=call) for call in calls if call[0] not in without]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results

    def sync(self, tensors, kind=SyncKind.transfer, full=True, without=()):
        self.sync_id += 1
        command = SyncCommand(kind, self.sync_id, self.setup, full=full)
        have = self.trainer_parameters(tensors)
        return self.on_all(
            lambda rank: self.senders[rank].send(command, have[rank]),
            lambda me: self.receivers[me].receive(command, self.arrived[me]),
            without,
        )

    def check(self, tensors):
        expected = engine_parameters(self.plan, tensors, dict(self.setup.dtypes))
        for me in self.plan.engine_ranks:
            for name, value in expected[me].items():
                assert torch.equal(
                    self.arrived[me][name].cpu().float().nan_to_num(7.0), value.float().nan_to_num(7.0)
                ), f"{name} at {me}"

    def close(self):
        for side in (*self.senders.values(), *self.receivers.values()):
            side.close()


def tp2_pp2_to_two_engines(multicast=False, arch=DENSE, **changes):
    sizes = dataclasses.replace(ParallelSizes(tp=2, pp=2), **changes)
    return Layouts(arch, sizes, EngineLayout(2), 2, multicast)
