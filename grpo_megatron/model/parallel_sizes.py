"""Sizes of the parallel groups that the trainer's ranks form, and which of them are legal."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ParallelSizes:
    """How the trainer's ranks are divided; everything else is derived from these.

    tp, pp, dp, cp: tensor, pipeline, data and context parallel; their product is the world. vpp:
    model chunks per pipeline stage, which the interleaved schedule alternates between. ep, etp:
    expert and expert-tensor parallel; experts are laid over the same ranks in their own way.
    pipeline_layers: layers of each of the pp * vpp chunks in forward order; None: equally many.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    sequence_parallel: bool = False
    vpp: int = 1
    ep: int = 1
    etp: int = 1
    pipeline_layers: tuple[int, ...] | None = None

    @classmethod
    def from_config(cls, megatron) -> "ParallelSizes":
        """megatron: config.schema.MegatronConfig."""
        return cls(
            tp=megatron.tensor_parallel,
            pp=megatron.pipeline_parallel,
            dp=megatron.data_parallel,
            cp=megatron.context_parallel,
            sequence_parallel=megatron.sequence_parallel,
            vpp=megatron.virtual_pipeline,
            ep=megatron.expert_parallel,
            etp=megatron.expert_tensor_parallel,
            pipeline_layers=tuple(megatron.pipeline_layers) if megatron.pipeline_layers else None,
        )

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp * self.cp

    @property
    def num_chunks(self) -> int:
        """Model chunks over all stages."""
        return self.pp * self.vpp

    @property
    def micro_batch_multiple(self) -> int:
        """The number of micro-batches of a replica must be a multiple of this."""
        return self.pp if self.vpp > 1 else 1

    def chunk_layers(self, num_layers: int) -> tuple[int, ...]:
        """Layers of each model chunk in forward order; chunk i is on stage i % pp."""
        return self.pipeline_layers or (num_layers // self.num_chunks,) * self.num_chunks

    def violations(self, arch=None) -> list[str]:
        """Every rule this layout breaks, each as one sentence; `arch`: the model's Architecture."""
        found = []
        for name in ("tp", "pp", "dp", "cp", "vpp", "ep", "etp"):
            if getattr(self, name) < 1:
                found.append(f"megatron: {name} must be at least 1, is {getattr(self, name)}")
        if found:
            return found
        if self.sequence_parallel and self.tp == 1:
            found.append("megatron.sequence_parallel=true needs megatron.tensor_parallel > 1")
        if self.vpp > 1 and self.pp == 1:
            found.append(f"megatron.virtual_pipeline={self.vpp} needs megatron.pipeline_parallel > 1")
        if self.pipeline_layers and (len(self.pipeline_layers) != self.num_chunks or min(self.pipeline_layers) < 1):
            found.append(
                f"megatron.pipeline_layers={list(self.pipeline_layers)} must be {self.num_chunks} positive numbers: the layers of "
                "each of pipeline_parallel * virtual_pipeline model chunks, in forward order"
            )
        stage = self.tp * self.cp * self.dp
        if stage % (self.ep * self.etp):
            found.append(
                f"megatron.expert_parallel * expert_tensor_parallel = {self.ep * self.etp} does not divide the {stage} ranks of a "
                "pipeline stage (tensor_parallel * context_parallel * data_parallel)"
            )
        return found if arch is None else found + self._dense_violations(arch) + self._expert_violations(arch)

    def _dense_violations(self, arch) -> list[str]:
        found = []
        if arch.num_heads % self.tp:
            found.append(f"megatron.tensor_parallel={self.tp} does not divide the model's {arch.num_heads} attention heads")
        if arch.num_kv_heads % self.tp and self.tp % arch.num_kv_heads:
            found.append(
                f"megatron.tensor_parallel={self.tp} and the model's {arch.num_kv_heads} KV heads: one must divide the other"
            )
        qkv_rows = (arch.num_heads + 2 * arch.num_kv_heads) * arch.head_dim
        if qkv_rows % self.tp:
            found.append(f"megatron.tensor_parallel={self.tp} does not divide the model's {qkv_rows} rows of Q, K and V")
        if arch.ffn_hidden_size % self.tp:
            found.append(
                f"megatron.tensor_parallel={self.tp} does not divide the model's intermediate size {arch.ffn_hidden_size}"
            )
        if self.sequence_parallel and arch.hidden_size % self.tp:
            found.append(f"megatron.tensor_parallel={self.tp} does not divide the model's hidden size {arch.hidden_size}")
        if self.pipeline_layers:
            if sum(self.pipeline_layers) != arch.num_layers:
                found.append(
                    f"megatron.pipeline_layers={list(self.pipeline_layers)} are {sum(self.pipeline_layers)} layers, "
                    f"the model has {arch.num_layers}"
                )
        elif arch.num_layers % self.num_chunks:
            chunks = f"megatron.pipeline_parallel={self.pp}"
            if self.vpp > 1:
                chunks += f" times megatron.virtual_pipeline={self.vpp}"
            found.append(
                f"{chunks} does not divide the model's {arch.num_layers} layers; megatron.pipeline_layers can name an uneven split"
            )
        return found

    def _expert_violations(self, arch) -> list[str]:
        if arch.moe is None:
            asked = {"expert_parallel": self.ep, "expert_tensor_parallel": self.etp}
            return [f"megatron.{key}={n} needs a model with experts, this one is dense" for key, n in asked.items() if n > 1]
        found = []
        if arch.moe.num_experts % self.ep:
            found.append(f"megatron.expert_parallel={self.ep} does not divide the model's {arch.moe.num_experts} experts")
        if arch.moe.ffn_hidden_size % self.etp:
            found.append(
                f"megatron.expert_tensor_parallel={self.etp} does not divide the experts' intermediate size "
                f"{arch.moe.ffn_hidden_size}"
            )
        if self.tp > 1 and not self.sequence_parallel:
            found.append("a model with experts and megatron.tensor_parallel > 1 needs megatron.sequence_parallel=true")
        return found
