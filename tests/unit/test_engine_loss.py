"""Groups whose engine dies while it samples them. tests/integration has real engines."""

import asyncio

import pytest

from grpo_megatron.cluster.processes import ProcessDied
from grpo_megatron.rollout.episodes import SingleTurn
from grpo_megatron.rollout.groups import EngineLost
from tests.rollouts import manager_of
from tests.unit.test_rounds import ROLLOUT, Engines, Rewards, prompts


class Dying(Engines):
    """Two engines. One of them dies when it is asked for a prompt in `deadly`, and answers nothing then."""

    def __init__(self, deadly, dies=(1,)):
        super().__init__()
        self.deadly, self.dies, self.dead, self.asked = deadly, dies, set(), []

    def connections(self):
        return [One(self, index) for index in range(self.size)]


class One:
    """The connection and the client of one of the engines."""

    def __init__(self, engines, index):
        self._engines, self._index = engines, index

    def client(self, round):
        return self

    async def generate(self, request):
        engines = self._engines
        engines.asked.append((self._index, request.prompt_ids[0]))
        await asyncio.sleep(0.01)
        if request.prompt_ids[0] in engines.deadly and self._index in engines.dies:
            engines.dead.add(self._index)
        if self._index in engines.dead:
            raise ProcessDied(f"engine {self._index} died in `generate`")
        return await engines.generate(request)

    async def end(self):
        if self._index in self._engines.dead:
            raise ProcessDied(f"engine {self._index} died in `end`")


def test_groups_of_an_engine_that_dies_are_sampled_by_another():
    engines = Dying(deadly={3})
    manager = manager_of(engines, SingleTurn(Rewards()))
    groups = manager.generate(prompts(*range(8)), ROLLOUT)
    assert [group.prompt.uid for group in groups] == list(range(8))
    assert [group.group_id for group in groups] == list(range(8))
    assert all(len(group.samples) == 2 for group in groups)
    assert {group.engine for group in groups[2:]} == {0}
    assert {uid for engine, uid in engines.asked if engine == 1} == {1, 3, 5, 7}
    assert engines.serving == {0: 0}
    again = manager.generate(prompts(*range(4)), ROLLOUT)
    assert {group.engine for group in again} == {0}


def test_the_loss_of_all_engines_is_an_error():
    engines = Dying(deadly={3}, dies=(0, 1))
    manager = manager_of(engines, SingleTurn(Rewards()))
    with pytest.raises(EngineLost, match=r"engine \d died in `generate`"):
        manager.generate(prompts(*range(8)), ROLLOUT)
    assert not engines.admission._rounds


def test_a_group_that_kills_engines_is_not_sampled_for_ever():
    engines = Dying(deadly={3}, dies=(0, 1))
    engines.lost = lambda *_: engines.dead.clear()  # they come back at once
    with pytest.raises(EngineLost, match="died in `generate`"):
        manager_of(engines, SingleTurn(Rewards())).generate(prompts(3), ROLLOUT)
    assert len(engines.asked) == 3 * 2
