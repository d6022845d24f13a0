"""Through Ray's object store: every rank puts buckets of full HF tensors there, every engine takes all of them."""

from collections import Counter
from collections.abc import Iterable

from grpo_megatron.model.entries import Entry
from grpo_megatron.weights.sync.interface import WeightSource, WeightTarget


class ObjectStore:
    """Works between any two layouts, over any network, on any machine; costs a copy through the hosts' memory.

    SGLang's own loaders fill the engine's parameters from the HF tensors, so that it serves engines too whose parameters are
    not described by a weight map. Their digests are not known then.
    """

    def __init__(self, entries: Iterable[Entry], bucket_bytes: int):
        """bucket_bytes: weight_sync.bucket_bytes, which bounds what a rank holds at a time."""
        self._engine_names = {hf: entry.engine for entry in entries if entry.exported for hf in entry.hf}
        self._bucket_bytes = bucket_bytes

    def transfer(self, source: WeightSource, target: WeightTarget, version: int) -> dict[str, float]:
        with source.weight_stream(self._bucket_bytes) as buckets:
            self._check(name for bucket in buckets for name in target.load_bucket(bucket))
        return {}

    def _check(self, delivered: Iterable[str]) -> None:
        """delivered: HF names in any order. Raises RuntimeError unless each tensor of the map is there exactly once."""
        counts = Counter(delivered)
        wrong = [
            f"{name}, which fills {engine}, came {counts[name]} times"
            for name, engine in self._engine_names.items()
            if counts[name] != 1
        ]
        wrong += [f"{name} is not in the weight map" for name in counts.keys() - self._engine_names.keys()]
        if wrong:
            raise RuntimeError(
                f"the weight sync delivered other tensors than the weight map of the architecture has ({len(wrong)} differ): "
                + "; ".join(sorted(wrong)[:5])
            )

    def close(self) -> None:
        pass
