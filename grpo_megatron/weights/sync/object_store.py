"""Transport through Ray's object store.

Every rank puts buckets of full HF tensors into the store, and every engine loads all of them.
"""

from collections import Counter
from collections.abc import Iterable

from grpo_megatron.model.entries import Entry
from grpo_megatron.weights.sync.interface import WeightSource, WeightTarget


class ObjectStore:
    """Transport that works between any two layouts, over any network and on any machine.

    It is slower than resharding, because full tensors are copied through the hosts' memory. SGLang's own
    loaders fill the engine's parameters from the HF tensors, so it is also the fallback for engines whose
    parameters no weight map describes. Digests (checksums) cannot be compared.
    """

    def __init__(self, entries: Iterable[Entry], bucket_bytes: int):
        """Remember which HF tensors must arrive in the engines.

        entries: the weight map of the model.
        bucket_bytes: weight_sync.bucket_bytes, the maximum bytes of a bucket.
        """
        self._engine_names = {hf: entry.engine for entry in entries if entry.exported for hf in entry.hf}
        self._bucket_bytes = bucket_bytes

    def transfer(self, source: WeightSource, target: WeightTarget, version: int) -> dict[str, float]:
        with source.weight_stream(self._bucket_bytes) as buckets:
            self._check(name for bucket in buckets for name in target.load_bucket(bucket))
        return {}

    def _check(self, delivered: Iterable[str]) -> None:
        """Raise RuntimeError unless each HF tensor of the weight map was loaded exactly once.

        delivered: HF names of the loaded tensors, in any order.
        """
        counts = Counter(delivered)
        wrong = [
            f"{name} (part of the engine's {engine}) was delivered {counts[name]} times"
            for name, engine in self._engine_names.items()
            if counts[name] != 1
        ]
        wrong += [f"{name} is not in the weight map" for name in counts.keys() - self._engine_names.keys()]
        if wrong:
            raise RuntimeError(
                "the weight sync did not deliver each tensor of the weight map exactly once "
                f"({len(wrong)} are wrong): " + "; ".join(sorted(wrong)[:5])
            )

    def close(self) -> None:
        pass
