"""One of two engines dies: the other samples its groups, it comes back, and no rank restarts."""

import contextlib
import itertools
import os
import random
import re
import signal
import threading
import time

import psutil
import pytest

from grpo_megatron.cli import main
from grpo_megatron.run.stop import StopRequest
from tests.integration.test_recovery import ENGINE, RANK, SCHEDULER, find
from tests.integration.train_runs import arguments, metrics

pytestmark = pytest.mark.slow


def serving(folder) -> list[float]:
    """Return how many engines served in each step so far."""
    with contextlib.suppress(OSError, ValueError):
        return [row["rollout/engines"] for row in metrics(folder, "run") if "rollout/engines" in row]
    return []


# How often an engine is killed beside training. A larger number, such as 10, takes a minute for each.
KILLS = int(os.environ.get("ENGINE_KILLS", "2"))


class Killer(threading.Thread):
    """Kills a process of an engine at a random moment, several times: when all engines serve again.

    ranks: ids of the rank processes that it has seen
    is_done: True when all engines serve again after the last time
    """

    def __init__(self, title, folder, times, seed):
        super().__init__(daemon=True)
        self._title, self._folder, self._times = title, folder, times
        self._random, self._ended = random.Random(seed), threading.Event()
        self.kills, self.ranks, self.is_done = 0, set(), False

    def run(self):
        while not self._ended.wait(0.1):
            served = serving(self._folder)
            # Before the first step, ranks of another run may be ending. Later, a process that writes the last
            # checkpoint looks like the rank that forked it.
            if served and not self.is_done:
                self.ranks |= set(find(RANK))
            returns = sum(before < now for before, now in itertools.pairwise(served))
            self.is_done = returns == self._times
            if served and returns == self.kills < self._times:
                time.sleep(self._random.uniform(0.0, 1.0))
                psutil.Process(self._random.choice(sorted(find(self._title)))).kill()
                self.kills += 1

    def stop(self):
        self._ended.set()
        self.join(timeout=30)


BESIDE_TRAINING = (
    "rollout.staleness=2",
    "rollout.on_update=continue",
    "train.old_logprobs=rollout",
    "cluster.placement=separate",
)


@pytest.mark.timeout(1500 + 120 * KILLS)
@pytest.mark.parametrize(
    ("title", "times", "changes"),
    [(ENGINE, 1, ()), (SCHEDULER, KILLS, BESIDE_TRAINING)],
    ids=["actor", "scheduler beside training"],
)
def test_the_other_engine_goes_on_and_the_lost_one_comes_back(
    ray_here, arithmetic, tmp_path, capsys, monkeypatch, title, times, changes
):
    """The run is asked to stop when the engine is back."""
    killer = Killer(title, tmp_path, times, seed=len(changes))

    def is_made(request):
        request.signal = signal.SIGTERM if killer.is_done else None
        return killer.is_done

    monkeypatch.setattr(StopRequest, "is_made", property(is_made))
    killer.start()
    endless = ["rollout.engine.num_engines=2", "run.total_steps=10000", "rollout.max_response_length=24"]
    status = main(["train", *arguments(arithmetic, tmp_path, *endless, *changes)])
    killer.stop()
    said = capsys.readouterr().out
    assert status == 75, said
    assert killer.kills == times, said
    assert len(re.findall(r"engine \d is started again; 1 of 2 engines serve meanwhile", said)) == times
    assert len(re.findall(r"engine \d has started, and will get requests", said)) == times, (
        "the run was too short"
    )
    assert "restart" not in said.replace("started again", "")
    assert len(killer.ranks) == 1, "a rank was started again"
    served = serving(tmp_path)
    assert {1, 2} == set(served)
    assert served[-1] == 2
    assert main(["ledger", f"{tmp_path}/run"]) == 0
    books = capsys.readouterr().out.splitlines()[-1].split()
    assert books[1] == books[2] == str(len(served) * 6 * 4), books  # admitted, trained
    assert set(books[3:7]) == {"0"}, books  # filtered, failed, lost, waiting


@pytest.mark.parametrize("two_nodes", [(1, 0)], indirect=True)
def test_a_node_that_joins_gets_an_engine_and_keeps_it_when_ranks_restart(
    two_nodes, arithmetic, tmp_path, capsys, monkeypatch
):
    """The run begins with one engine. Then a node joins, and later the rank is killed."""
    killed = []

    def is_made(request):
        served = serving(tmp_path)
        if len(served) == 1 and len(two_nodes.list_all_nodes()) == 2:
            two_nodes.add_node(num_cpus=1, object_store_memory=80 * 2**20)
        elif not killed and served[-1:] == [2]:
            killed.append(find(RANK)[0])
            psutil.Process(killed[0]).kill()
        elif killed and served[-1:] == [2] and set(find(RANK)) - set(killed):
            request.signal = signal.SIGTERM
        return request.signal is not None

    monkeypatch.setattr(StopRequest, "is_made", property(is_made))
    changes = ["rollout.engine.max_engines=2", "run.total_steps=10000", "checkpoint.every=1"]
    status = main(["train", *arguments(arithmetic, tmp_path, *changes, *BESIDE_TRAINING)])
    said = capsys.readouterr().out
    assert status == 75, said
    assert "starting engine 1 on free devices" in said
    assert said.count("engine 1 has started, and will get requests after the next weight sync") == 1, said
    served = serving(tmp_path)
    assert served[0] == 1
    assert served[-1] == 2
    assert main(["ledger", f"{tmp_path}/run"]) == 0
    books = capsys.readouterr().out.splitlines()[-1].split()
    assert books[2] == str(len(served) * 6 * 4), books  # trained
