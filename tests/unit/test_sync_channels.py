"""What weight sync's channels ask of others while parcels travel, and what they leave behind."""

from collections import Counter
from contextlib import closing
from pathlib import Path

from grpo_megatron.weights.sync.order import Setup, Way
from tests.unit.test_reshard import DENSE, Cluster, hf_tensors, tp2_pp2_to_two_engines


class CountedStore:
    """The driver's store, as a rank reaches it; `asked` counts the operations of all ranks."""

    def __init__(self, store, asked):
        self._store, self._asked = store, asked

    def __getattr__(self, name):
        self._asked[name] += 1
        return getattr(self._store, name)


def test_parcels_within_a_node_do_not_pass_through_the_drivers_store(monkeypatch):
    """It would be asked eight times for each of some 10,000 parcels of a large model, in one thread."""
    asked, connect = Counter(), Setup.connect
    monkeypatch.setattr(Setup, "connect", lambda setup: CountedStore(connect(setup), asked))
    tensors = hf_tensors(DENSE)
    with closing(Cluster(tp2_pp2_to_two_engines(True), Way.shared_memory)) as one:
        one.sync(tensors)
        meetings = sum(len({link.carrier for link in one.plan.incoming(me)}) for me in one.plan.engine_ranks)
        assert asked == {"set": len(one.senders), "wait": meetings, "get": meetings}
        asked.clear()
        one.sync(tensors)
        one.check(tensors)
        assert not asked


def test_shared_memory_has_no_name_that_a_killed_process_could_leave():
    with closing(Cluster(tp2_pp2_to_two_engines(True), Way.shared_memory)) as one:
        one.sync(hf_tensors(DENSE))
        mapped = Path("/proc/self/maps").read_text()
        assert "grpo-weights" in mapped
        assert "/dev/shm/grpo" not in mapped
