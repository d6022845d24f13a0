"""HeldEngines: engines of a pool that keep their weights while the others get newer ones."""

from collections.abc import Mapping

from grpo_megatron.errors import ProcessLost
from grpo_megatron.sglang.admission import Admission, Closed
from grpo_megatron.sglang.pool import EnginePool


class HeldEngines:
    """Some engines of an EnginePool that keep their weights for an evaluation, while training goes on.

    The evaluation's RolloutManager gets this object instead of the pool. It has those methods of the pool
    that a RolloutManager uses.

    admission: admits the rounds of the evaluation. Weight updates of the other engines do not close it.
    weight_version: version of the weights that the engines keep.
    """

    def __init__(self, pool: EnginePool, most: int):
        """Hold no engines yet. `hold` chooses them.

        pool: the run's engines.
        most: maximum number of engines to hold.
        """
        self._pool, self._most = pool, most
        self._held: Mapping[int, int] = {}
        # Continue the pool's numbers of rounds. The engines outlive this object if the ranks restart, and
        # they ignore rounds with old numbers.
        self.admission, self.weight_version = Admission(pool.admission.numbers), 0
        self.admission.open(Closed.unsynced)

    @property
    def end_ids(self) -> frozenset[int]:
        return self._pool.end_ids

    @property
    def serving(self) -> Mapping[int, int]:
        """{index: number of starts} of the engines that are held and have not been lost."""
        return self._pool.membership.not_lost(self._held)

    def hold(self) -> bool:
        """Let some engines keep their weights until `release`. Return False if only one engine serves.

        If only one engine serves, none is held, so that training can go on. Raises UserError if the pool's
        engines take no requests, such as during a weight update.
        """
        self._pool.admission.must_be_open()
        self._held, self.weight_version = self._pool.membership.hold(self._most), self._pool.weight_version
        return bool(self._held)

    def release(self) -> None:
        """Let the held engines take part in the next weight update, and serve after it."""
        self._pool.membership.release(self._held)
        self._held = {}

    def lost(self, index: int, starts: int, error: Exception) -> None:
        self._pool.lost(index, starts, error)

    async def next_serving(self) -> Mapping[int, int]:
        """Raise ProcessLost, instead of waiting for an engine that can take over.

        This method is called when all held engines have been lost. No other engine has the weights that are
        evaluated.
        """
        raise ProcessLost("all engines that had the evaluated weights have been lost")
