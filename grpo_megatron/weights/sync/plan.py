"""What a weight sync has to deliver, and where in the engines it goes; from the weight map of the architecture."""

from collections import Counter
from collections.abc import Iterable

from grpo_megatron.model.entries import Entry


class Plan:
    """All tensors of one sync by their HF names, each with the engine's parameter that it fills, or a part of it."""

    def __init__(self, entries: Iterable[Entry]):
        """entries: of weights.maps.weight_map."""
        self._entries = [entry for entry in entries if entry.exported]
        self._engine_names = {hf: entry.engine for entry in self._entries for hf in entry.hf}

    def check(self, delivered: Iterable[str]) -> None:
        """delivered: HF names in any order. Raises RuntimeError unless each tensor of the plan is there exactly once."""
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
