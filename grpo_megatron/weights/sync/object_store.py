"""Transport through Ray's object store.

Every rank puts buckets of full HF tensors into the store, and every engine loads all of them.
"""

from collections import Counter
from collections.abc import Iterable

from grpo_megatron.model.entries import Entry
from grpo_megatron.weights.sync.interface import WeightSource, WeightTarget


class ObjectStore:
    """Transport that works between any two layouts, over any network and on any machine.

    It costs a copy through the hosts' memory. SGLang's own loaders fill the engine's parameters from the HF
    tensors, so this transport also serves engines whose parameters no weight map describes. Digests cannot
    be compared.
    """

    def __init__(self, entries: Iterable[Entry], bucket_bytes: int):
        """bucket_bytes: weight_sync.bucket_bytes, the most bytes that a rank holds at a time."""
        self._engine_names = {hf: entry.engine for entry in entries if entry.exported for hf in entry.hf}
        self._bucket_bytes = bucket_bytes

    def transfer(self, source: WeightSource, target: WeightTarget, version: int) -> dict[str, float]:
        with source.weight_stream(self._bucket_bytes) as buckets:
            self._check(name for bucket in buckets for name in target.load_bucket(bucket))
        return {}

    def _check(self, delivered: Iterable[str]) -> None:
        """Raise RuntimeError unless each tensor of the weight map was delivered exactly once.

        delivered: HF names in any order.
        """
        counts = Counter(delivered)
        wrong = [
            f"{name}, which fills {engine}, came {counts[name]} times"
            for name, engine in self._engine_names.items()
            if counts[name] != 1
        ]
        wrong += [f"{name} is not in the weight map" for name in counts.keys() - self._engine_names.keys()]
        if wrong:
            raise RuntimeError(
                "the weight sync delivered other tensors than the weight map of the architecture has "
                f"({len(wrong)} differ): " + "; ".join(sorted(wrong)[:5])
            )

    def close(self) -> None:
        pass
