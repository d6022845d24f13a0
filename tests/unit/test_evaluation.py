"""What evaluations report and keep."""

import json
from itertools import combinations
from types import SimpleNamespace

import numpy as np
import pytest

from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.batch.sample import Group
from grpo_megatron.config.schema import Config, EvalConfig
from grpo_megatron.rollout.evaluation import Evaluation
from grpo_megatron.rollout.statistics import pass_at_k
from tests.models import random_samples
from tests.tools import no_file_beyond


@pytest.mark.parametrize(("n", "c"), [(4, 0), (4, 1), (5, 2), (6, 6)])
@pytest.mark.parametrize("k", [1, 2, 4])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(n, c, k):
    subsets = list(combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_samples_that_have_no_room_are_left_out(tmp_path, capsys):
    group = Group(0, Prompt(3, np.array([1]), "1+1", "2"), tuple(s.scored(1.0, {}) for s in random_samples(count=2)))
    engines = SimpleNamespace(generate=lambda prompts, sampling: [group])
    evaluation = Evaluation(engines, {"held_out": [group.prompt]}, Config(eval=EvalConfig(n=2, greedy=False)), str(tmp_path))
    with no_file_beyond(50):
        assert evaluation.run(1)["eval/mean@2"] == evaluation.run(2)["eval/mean@2"] == 1.0
    assert list((tmp_path / "eval").iterdir()) == []
    assert capsys.readouterr().out.count("step_00000001_held_out.jsonl could not be written (File too large)") == 1
    evaluation.run(3)
    row = json.loads((tmp_path / "eval" / "step_00000003_held_out.jsonl").read_text())
    assert (row["uid"], len(row["responses"])) == (3, 2)
