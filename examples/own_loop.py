"""GRPO as a loop of one's own, on the quickstart's task. Further arguments are configuration keys.

python tools/quickstart.py --prepare
python examples/own_loop.py configs/quickstart.yaml run.name=own_loop
"""

import json
import random
import re
import sys
from pathlib import Path

import numpy as np

from grpo_megatron.api import Datum, Session, load, open_session


def reward(text: str, problem: dict) -> float:
    """Return 1 if the response ends with the right number, else 0."""
    found = re.search(r"#(\d+)$", text)
    return float(bool(found) and int(found[1]) == int(problem["answer"]))


def sampled(session: Session, problems: list[dict], n: int):
    """Sample n responses to each problem. Return (groups of samples, rewards [problems, n])."""
    groups = session.sample([problem["prompt"] for problem in problems], n)
    pairs = zip(groups, problems, strict=True)
    return groups, np.array([[reward(one.response_text, problem) for one in own] for own, problem in pairs])


def main(arguments: list[str]) -> tuple[float, float]:
    config = load(arguments[0], arguments[1:])
    files = (Path(path).read_text().splitlines() for path in (config.data.train, config.data.eval))
    train, held_out = ([json.loads(line) for line in lines] for lines in files)
    with open_session(config) as session:
        before = sampled(session, held_out, 4)[1].mean()
        for step in range(config.run.total_steps):
            problems = random.Random(step).sample(train, config.data.train_batch_size)
            groups, rewards = sampled(session, problems, config.rollout.n)
            spread = rewards.std(axis=1, keepdims=True, ddof=1) + 1e-6
            advantages = ((rewards - rewards.mean(axis=1, keepdims=True)) / spread).flatten()
            samples = [sample for group in groups for sample in group]
            weight = 1 / sum(sample.num_trained for sample in samples)
            pairs = zip(samples, advantages, strict=True)
            session.forward_backward([Datum.of(one, advantage, weight) for one, advantage in pairs], "clip")
            norm = session.optim_step().grad_norm
            session.publish()
            session.log({"reward/mean": rewards.mean(), "actor/grad_norm": norm})
            print(f"step {step + 1}  reward {rewards.mean():.2f}  gradient norm {norm:.2f}", flush=True)
        after = sampled(session, held_out, 4)[1].mean()
        session.save_hf(f"{session.directory}/hf")
    print(f"correct on held-out problems: {before:.0%} before, {after:.0%} after")
    return before, after


if __name__ == "__main__":
    main(sys.argv[1:])
