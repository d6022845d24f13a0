"""Train a policy from preferences: a reward model on pairs of responses, then GRPO on its scores.

    python tools/preference_pipeline.py [--strategy sampling|beam] [--seed S] [--root DIR] [key=value ...]

Task, model and warm start are the quickstart's. The reward model is trained with
configs/reward_model_quickstart.yaml. The GRPO run is configs/reward_model_grpo.yaml; extra key=value
arguments are passed on to it. --strategy decides whether the responses of a group are sampled or found by
beam search. Neither training sees the answers of the task.

Prints a table with a line for each evaluation of the policy and, as its last line, one JSON object:

    accuracy_of_pairs             share of the held-out pairs in which the preferred response has the higher
                                  score, after training
    reward_before, reward_after   mean score of 4 samples for each held-out problem, before and after GRPO
    right_before, right_after     share of the same samples that end with the right answer
"""

import argparse
import json
from pathlib import Path

from quickstart import CLI, CONFIGS, call, common, grpo_arguments, prepare, with_overrides

from grpo_megatron.files import json_text

JUDGE, POLICY = "reward_model_quickstart", "reward_model_grpo"


def judged(samples: Path) -> dict[str, float]:
    """Return {"reward": ..., "right": ...} of an evaluation of the policy.

    "reward" is the mean score that the reward model gave the responses. "right" is the share of the responses
    that end with the right answer.

    samples: file with the samples of the evaluation, step_*_eval.jsonl in the run's folder eval.
    """
    lines = [json.loads(line) for line in samples.read_text(encoding="utf-8").splitlines()]
    pairs = [(response, f" #{line['answer']}") for line in lines for response in line["responses"]]
    score = sum(response["reward"] for response, _ in pairs) / len(pairs)
    return {
        "reward": score,
        "right": sum(response["text"].endswith(answer) for response, answer in pairs) / len(pairs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--strategy",
        default="sampling",
        choices=("sampling", "beam"),
        help="how the responses of a group are generated",
    )
    parser.add_argument("--seed", type=int, default=1234, help="seed of task, models and trainings")
    parser.add_argument("--root", default="runs", help="folder for everything that is written")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="values that override the file's")
    options = parser.parse_intermixed_args()
    root, seed, file = options.root, str(options.seed), str(CONFIGS / f"{POLICY}.yaml")
    scorer = [f"reward.model.path={root}/{JUDGE}/hf", f"rollout.strategy={options.strategy}"]
    arguments = with_overrides(parser, options.overrides, file, [*grpo_arguments(root, seed), *scorer])
    prepare(root, seed)
    pairs = [
        f"data.{key}={root}/quickstart_data/{name}.jsonl"
        for key, name in (("train", "preferences"), ("eval", "preferences_eval"))
    ]
    judge = [*common(root, seed), f"model.path={root}/quickstart_sft/hf", *pairs]
    call("reward model", *CLI, "reward-model", "--config", str(CONFIGS / f"{JUDGE}.yaml"), *judge)
    call("GRPO", *CLI, "train", "--config", file, *arguments)
    pairs_right = json.loads(Path(root, JUDGE, "result.json").read_text(encoding="utf-8"))
    files = sorted(Path(root, POLICY, "eval").glob("step_*_eval.jsonl"))
    evaluations = {int(path.stem.split("_")[1]): judged(path) for path in files}
    before, after = (pairs_right[when]["eval/accuracy"] for when in ("before", "after"))
    print("\n== result")
    print(f"  held-out pairs whose right response scores higher: {before:.1%} before, {after:.1%} after")
    print(f"  {'GRPO step':>9}{'mean score':>12}{'right answers':>15}")
    for step, values in evaluations.items():
        print(f"  {step:>9}{values['reward']:>12.2f}{values['right']:>15.1%}")
    result = {"accuracy_of_pairs": after}
    for when, step in (("before", min(evaluations)), ("after", max(evaluations))):
        result |= {f"{name}_{when}": value for name, value in evaluations[step].items()}
    print(json_text(result))


if __name__ == "__main__":
    main()
