"""An environment is closed however its episode ends. Its process is real; the model's turns are given."""

import asyncio

import pytest

from grpo_megatron.config.reward import RewardConfig
from grpo_megatron.config.rollout import RolloutConfig
from grpo_megatron.errors import UserError
from grpo_megatron.rollout.episodes import MultiTurn
from grpo_megatron.rollout.trajectory import Episode
from tests.integration.scripted_episodes import LETTERS, Script, of, play, prompt
from tests.unit.toy_environments import encode


@pytest.fixture(scope="module")
def closing(places):
    environments = of("Closing", places(1))
    yield environments
    environments.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("turns", "do", "error", "steps"),
    [
        (["a", "end"], "", None, "2;"),
        (["a", "b"], "", None, "2;"),  # out of turns
        (["a", "b" * 200], "", None, "2;"),  # cut off
        (["a", "raise"], "", "ZeroDivisionError: planted", "2;"),
        ([], "reset and raise", "ZeroDivisionError: planted", "0;"),
        ([], "made to raise", "ZeroDivisionError: planted", None),
        ([], "", "the engine is gone", "0;"),
    ],
)
def test_an_environment_is_closed_however_its_episode_ends(closing, tmp_path, turns, do, error, steps):
    asked, script = prompt(file=str(tmp_path / "closed"), do=do), Script(*turns)

    async def respond(ids, most, routed=0):
        if not turns:
            raise UserError("the engine is gone")
        return await script(ids, most)

    if error:
        with pytest.raises(UserError, match=error):
            play(closing, respond, asked, max_turns=2)
    else:
        play(closing, respond, asked, max_turns=2)
    assert (tmp_path / "closed").read_text() == steps if steps else not (tmp_path / "closed").exists()


def test_an_aborted_episode_is_closed(closing, tmp_path):
    """Dynamic sampling aborts episodes that a full batch does not need."""

    async def abort():
        asked = asyncio.Event()

        async def never(ids, most, routed=0):
            asked.set()
            await asyncio.Event().wait()

        episode = Episode(prompt(file=str(tmp_path / "closed")), 2, 5, 100, (0, 0))
        task = asyncio.create_task(
            MultiTurn(closing, LETTERS, RolloutConfig(), RewardConfig(), 0).play(episode, never)
        )
        await asked.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(abort())
    assert (tmp_path / "closed").read_text() == "0;"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("do", "says"),
    [
        ("raise at the end", "failed: ZeroDivisionError: planted at the end; the run continues"),
        ("spin at the end", "took longer than reward.timeout=1.0 s; the run continues"),
    ],
)
def test_one_that_cannot_be_closed_is_one_message(places, tmp_path, capsys, do, says):
    environments = of("Closing", places(1), timeout=1.0)
    try:
        for _ in range(2):
            assert play(environments, Script("end"), prompt(file=str(tmp_path / "closed"), do=do)).reward == 1
    finally:
        environments.close()
    assert (tmp_path / "closed").read_text() == "1;1;"
    (line,) = capsys.readouterr().out.strip().splitlines()
    assert f"environment tests.unit.toy_environments:Closing: close() on record 7 {says}" in line


@pytest.mark.slow
def test_one_in_a_busy_process_is_closed_later(places, tmp_path):
    environments = of("Closing", places(1), timeout=1.0)
    asked = prompt(file=str(tmp_path / "closed"))

    async def leave():
        world, other = environments.episode(asked), environments.episode(asked)
        await asyncio.gather(world.reset(0), other.reset(0))
        steps = [asyncio.ensure_future(other.step(encode("sleep"))) for _ in range(5)]
        await asyncio.sleep(0.1)
        await world.close()
        assert not all(step.done() for step in steps)

    try:
        asyncio.run(leave())
        play(environments, Script("end"), asked)
    finally:
        environments.close()
    assert (tmp_path / "closed").read_text() == "0;1;"
