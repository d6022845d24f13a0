"""The order in which training prompts are handed out."""

from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.data.lazy import ConcatSequence, contents_of
from grpo_megatron.errors import ANOTHER_RUN, UserError


class EpochOrder:
    """An endless stream of the indices 0 to size-1, in which each index occurs once per epoch.

    The order of an epoch depends only on the seed and the number of the epoch, so a resumed run can continue
    the epoch.

    contents: {name of a data source: digest of its records}. Checkpoints store these digests, so that a
        resumed run can tell whether the data has changed.
    """

    def __init__(
        self, size: int, seed: int, shuffle: bool, contents: Mapping[str, str] = MappingProxyType({})
    ):
        self.size, self.seed, self.shuffle, self.contents = size, seed, shuffle, dict(contents)
        self.epoch, self.position = 0, 0
        self._order = self._make_order()

    @classmethod
    def of(cls, items: Sequence, seed: int, shuffle: bool) -> "EpochOrder":
        """Create the order in which the indices of `items` are taken, from the beginning of epoch 0."""
        return cls(len(items), seed, shuffle, contents_of(items))

    def _make_order(self) -> np.ndarray:
        if not self.shuffle:
            return np.arange(self.size)
        return np.random.default_rng([self.seed, self.epoch]).permutation(self.size)

    def take(self, count: int) -> list[int]:
        """Return the next `count` indices. If the epoch ends, the indices of the next epoch follow."""
        taken: list[int] = []
        while len(taken) < count:
            if self.position == self.size:
                self.epoch, self.position = self.epoch + 1, 0
                self._order = self._make_order()
            part = self._order[self.position : self.position + count - len(taken)]
            self.position += len(part)
            taken += part.tolist()
        return taken

    def state_dict(self) -> dict:
        return {
            "epoch": self.epoch,
            "position": self.position,
            "size": self.size,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "contents": self.contents,
        }

    def must_fit(self, state: dict) -> str:
        """Check that this order can be continued from a saved state, which must belong to the same data.

        state: what `state_dict` returned when the checkpoint was written.

        Returns a note for the user about what could not be compared, or "" if everything was compared. Raises
        UserError if the data, the seed or the setting `shuffle` differ.
        """
        saved = (state["size"], state["seed"], state["shuffle"])
        if saved != (self.size, self.seed, self.shuffle):
            raise UserError(
                "the epoch cannot be continued in the checkpoint's order, because the data has changed "
                "from {} records, seed {} and shuffle={} to {} records, seed {} and shuffle={}; {}".format(
                    *saved, self.size, self.seed, self.shuffle, ANOTHER_RUN
                )
            )
        contents = state.get("contents")
        if contents is None:
            return (
                "the checkpoint was written by an earlier version that stored no checksum of the data, so "
                "changes to the data since then are not detected"
            )
        # Compare by position and not by name, because the files may have been moved.
        if list(contents.values()) != list(self.contents.values()):
            changed = [source for source, digest in self.contents.items() if digest not in contents.values()]
            raise UserError(
                f"data.train: the records of {', '.join(changed or self.contents)} have changed since the "
                "checkpoint was written, so the rest of the epoch would mix old and new data; restore the "
                f"old files, {ANOTHER_RUN}"
            )
        return ""

    def load_state_dict(self, state: dict) -> None:
        self.must_fit(state)
        self.epoch, self.position = state["epoch"], state["position"]
        self._order = self._make_order()


class PromptSource:
    """The training prompts of one or several data sources, handed out step by step.

    Without data.train_weights, all sources form one data set, and each prompt occurs once per epoch. With
    weights, each source has its own epochs, and supplies its share of the prompts, exact to within one
    prompt.

    A checkpoint stores the position in each source's order. If a resumed run has other weights, the new
    shares hold for the prompts handed out after the resume.
    """

    def __init__(
        self,
        sources: Sequence[Sequence[Prompt]],
        seed: int,
        shuffle: bool,
        weights: list[float] | None = None,
    ):
        self._sources = sources if weights else [ConcatSequence(sources)]
        self._shares = [weight / sum(weights) for weight in weights] if weights else [1.0]
        self._orders = [EpochOrder.of(source, seed + i, shuffle) for i, source in enumerate(self._sources)]
        self._taken = [0] * len(self._sources)
        # (source, index) of each prompt that is to be handed out again.
        self._returned: list[tuple[int, int]] = []
        # (source, index, uid) of each prompt that was handed out, and not settled or taken back.
        self._lent: list[tuple[int, int, int]] = []

    def next(self, count: int) -> list[Prompt]:
        """Hand out the next `count` prompts. Prompts that were taken back come first.

        The caller must later pass each prompt to `settle` if it was used, or to `take_back` if not. Until
        then, checkpoints count the prompt as unused: a run that resumes from such a checkpoint hands it out
        again.
        """
        return [
            self._prompt(*(self._returned.pop(0) if self._returned else self._next_place()))
            for _ in range(count)
        ]

    def settle(self, prompts: Sequence[Prompt]) -> None:
        """Mark prompts that were handed out as used, so that a resumed run does not repeat them."""
        self._remove(prompts)

    def take_back(self, prompts: Sequence[Prompt]) -> None:
        """Take back prompts that were handed out but not used. `next` hands them out before new ones."""
        self._returned = self._remove(prompts) + self._returned

    def _remove(self, prompts: Sequence[Prompt]) -> list[tuple[int, int]]:
        """Remove prompts from the list of those that are handed out (`_lent`).

        Returns (source, index) of each removed prompt, in the order in which the prompts were handed out.
        """
        ended, removed, left = Counter(prompt.uid for prompt in prompts), [], []
        for source, index, uid in self._lent:
            if ended[uid]:
                ended[uid] -= 1
                removed.append((source, index))
            else:
                left.append((source, index, uid))
        self._lent = left
        return removed

    def _prompt(self, source: int, index: int) -> Prompt:
        prompt = self._sources[source][index]
        self._lent.append((source, index, prompt.uid))
        return prompt

    def _next_place(self) -> tuple[int, int]:
        total = sum(self._taken) + 1
        behind = [share * total - taken for share, taken in zip(self._shares, self._taken, strict=True)]
        source = behind.index(max(behind))
        self._taken[source] += 1
        return source, self._orders[source].take(1)[0]

    def first(self, count: int) -> list[Prompt]:
        """Return the first `count` prompts of the first source, or all its prompts if it has fewer.

        Without data.train_weights, all sources count as one. The prompts are not handed out by this call, so
        training still gets them.
        """
        return [self._sources[0][index] for index in range(min(count, len(self._sources[0])))]

    @property
    def epoch(self) -> int:
        """Number of the epoch, counted from 0, of the source that is furthest ahead."""
        return max(order.epoch for order in self._orders)

    def state_dict(self) -> dict:
        """Return the position in the data, for checkpoints.

        A resumed run begins with the prompts that are handed out but not settled at this moment, followed by
        the prompts that were taken back.
        """
        returned = [[source, index] for source, index, *_ in (*self._lent, *self._returned)]
        orders = [order.state_dict() for order in self._orders]
        return {"orders": orders, "taken": list(self._taken), "shares": self._shares, "returned": returned}

    def must_fit(self, state: dict) -> str:
        """Check that the sources can be continued from a saved state, which must belong to the same data.

        state: what `state_dict` returned when the checkpoint was written.

        Returns a note for the user about what could not be compared, or "" if everything was compared. Raises
        UserError if the data, the number of sources, the seed or the setting `shuffle` differ.
        """
        if len(state["orders"]) != len(self._orders):
            raise UserError(
                f"data.train has {len(self._orders)} sources, but had {len(state['orders'])} when the "
                f"checkpoint was written; {ANOTHER_RUN}"
            )
        notes = [order.must_fit(saved) for order, saved in zip(self._orders, state["orders"], strict=True)]
        return next(filter(None, notes), "")

    def load_state_dict(self, state: dict) -> None:
        """Continue at the position in a saved state. Raises UserError if the state belongs to other data.

        If the weights have changed, the shares of the sources are counted anew from here.

        state: what `state_dict` returned when the checkpoint was written.
        """
        self.must_fit(state)
        if state.get("shares", self._shares) != self._shares:
            # Start counting again. Otherwise one source would supply every prompt until it has its new share
            # of all prompts that were handed out before.
            state = state | {"taken": [0] * len(self._sources)}
        for order, saved in zip(self._orders, state["orders"], strict=True):
            order.load_state_dict(saved)
        self._taken = list(state["taken"])
        self._returned, self._lent = [(source, index) for source, index in state.get("returned", [])], []
