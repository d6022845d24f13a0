"""The quickstart reads its arguments before it works for minutes."""

import pytest

from tests.tools import run_tool


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("rollout.temprature=0.5", "did you mean 'rollout.temperature'"),
        ("rollout.n=few", "rollout.n"),
        ("data.train_batch_size=33", "train.ppo_mini_batch_size"),
    ],
)
def test_what_is_wrong_is_said_at_once(tmp_path, argument, message):
    out, err = run_tool("quickstart", "--root", tmp_path, argument, status=2)
    assert message in err
    assert out == ""
    assert list(tmp_path.iterdir()) == []
