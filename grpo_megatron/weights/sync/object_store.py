"""Through Ray's object store: every rank puts buckets of full HF tensors there, every engine takes all of them."""

from grpo_megatron.weights.sync.interface import WeightSource, WeightTarget


class ObjectStore:
    """Works between any two layouts, over any network, on any machine; costs a copy through the hosts' memory.

    bucket_bytes: cluster.sync_bucket_bytes, which bounds what a rank holds at a time.
    """

    def __init__(self, bucket_bytes: int):
        self._bucket_bytes = bucket_bytes

    def transfer(self, source: WeightSource, target: WeightTarget) -> list[str]:
        with source.weight_stream(self._bucket_bytes) as buckets:
            return [name for bucket in buckets for name in target.load_bucket(bucket)]
