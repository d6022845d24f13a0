"""Run FrozenLake from beginning to end: make maps and a tiny model, train it, and show how it plays.

    python tools/frozen_lake.py [--seed S] [--root DIR] [key=value ...]

The GRPO run is configs/frozen_lake.yaml; extra key=value arguments are passed on to it. The tool needs the
package gymnasium. The maps are 4x4 and not slippery, each with a way to the goal. No map of the evaluation is
trained on. The warm start trains the model on episodes of a player that mostly moves at random (see --lost).

Prints an episode before and after GRPO and, as its last line, one JSON object:

    success_before, success_after   share of the held-out maps on which an episode at temperature 1 reaches
                                    the goal
    train_seconds                   duration of the GRPO steps
    wall_seconds                    duration of everything
"""

import argparse
import json
import os
import random
import re
import sys
import time
from collections import deque
from pathlib import Path

from gymnasium.envs.toy_text.frozen_lake import generate_random_map
from quickstart import CLI, CONFIGS, TOOLS, call, common, with_overrides

from grpo_megatron.files import json_text

# Make the package `examples` importable in this process and in the run's processes, whatever their folder.
sys.path.insert(0, str(TOOLS.parent))
os.environ["PYTHONPATH"] = os.pathsep.join([str(TOOLS.parent), os.environ.get("PYTHONPATH", "")]).rstrip(
    os.pathsep
)
from examples.frozen_lake import EDGE, MOVES, around, field_at

TURNS = 10  # rollout.max_turns


def some_maps(count: int, seed: int) -> list[list[str]]:
    """Return `count` different random maps of 4x4 fields, each with a way to the goal.

    A map is a list of rows, such as "SFFH".
    """
    found: dict[tuple[str, ...], None] = {}
    while len(found) < count:
        found[tuple(generate_random_map(size=4, p=0.8, seed=seed))] = None
        seed += 1
    return [list(rows) for rows in found]


def distances(rows: list[str]) -> dict[tuple[int, int], int]:
    """Return {(row, column): number of moves to the goal} for all fields that have a way to the goal."""
    goal = (len(rows) - 1, len(rows[0]) - 1)
    found, waiting = {goal: 0}, deque([goal])
    while waiting:
        row, column = waiting.popleft()
        for down, right in MOVES.values():
            place = row + down, column + right
            if field_at(rows, *place) not in (EDGE, "H") and place not in found:
                found[place] = found[row, column] + 1
                waiting.append(place)
    return found


def play(rows: list[str], rng: random.Random, lost: float) -> list[dict[str, str]]:
    """Play one episode as an example for the warm start. Return it as chat messages.

    The assistant's messages are moves, and the user's messages describe the fields around the player. The
    episode ends at the goal, in a hole, or after TURNS moves.

    lost: probability with which the player moves in a random direction. Otherwise it moves nearer to the
        goal.
    """
    nearer, place, messages = distances(rows), (0, 0), []
    for turn in range(TURNS):
        if turn:
            messages.append({"role": "user", "content": around(rows, *place)})
        reached = {move: (place[0] + down, place[1] + right) for move, (down, right) in MOVES.items()}
        good = [move for move, there in reached.items() if nearer.get(there, len(nearer)) < nearer[place]]
        move = rng.choice(list(MOVES) if rng.random() < lost else good)
        messages.append({"role": "assistant", "content": move})
        if field_at(rows, *reached[move]) != EDGE:
            place = reached[move]
        if field_at(rows, *place) in "HG":
            break
    return messages


def record(rows: list[str]) -> dict:
    return {"prompt": "\n".join(rows), "answer": "G", "desc": rows}


def make(out: Path, seed: int, train: int, held_out: int, episodes: int, lost: float) -> dict[str, int]:
    """Write the data files of both trainings. Return {file name without .jsonl: number of records}.

    These are train.jsonl and eval.jsonl with maps, and sft.jsonl with episodes on the maps of train.jsonl.

    train, held_out: numbers of maps in train.jsonl and eval.jsonl.
    episodes: number of episodes in sft.jsonl.
    lost: probability of a random move in an episode.
    """
    rng = random.Random(seed)
    maps = some_maps(train + held_out, seed)
    rng.shuffle(maps)
    taught = []
    for _ in range(episodes):
        rows = rng.choice(maps[held_out:])
        # The prompt looks as in the environment: the map, and the surroundings of the player's first field.
        taught.append({"prompt": "\n".join([*rows, around(rows, 0, 0)]), "response": play(rows, rng, lost)})
    files = {
        "train": [record(rows) for rows in maps[held_out:]],
        "eval": [record(rows) for rows in maps[:held_out]],
        "sft": taught,
    }
    out.mkdir(parents=True, exist_ok=True)
    for name, records in files.items():
        (out / f"{name}.jsonl").write_text(
            "".join(json_text(item) + "\n" for item in records), encoding="utf-8"
        )
    return {name: len(records) for name, records in files.items()}


def show(title: str, samples: Path) -> None:
    """Print the first episode of an evaluation: its map, reward and moves.

    title: heading, such as `before GRPO`.
    samples: file with the samples of the evaluation, step_*_eval.jsonl in the run's folder eval.
    """
    line = json.loads(samples.read_text(encoding="utf-8").splitlines()[0])
    response = line["responses"][0]
    rows = line["prompt"].removeprefix("<user>").removesuffix("<assistant>")
    print(f"\n== {title}: reward {response['reward']:g}, {response['finish_reason']}\n{rows}")
    # The response alternates between a move and the surroundings after it. Print each pair on a line.
    print(around(rows.split(), 0, 0) + re.sub(r"([LDRU])(?=\d|$)", r" -> \1\n", response["text"]).rstrip())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1234, help="seed of maps, model, warm start and training")
    parser.add_argument("--root", default="runs", help="folder for everything that is written")
    parser.add_argument("--maps", type=int, default=2000, help="number of maps to train on")
    parser.add_argument("--held-out", type=int, default=100, help="number of maps of the evaluation")
    parser.add_argument("--episodes", type=int, default=8000, help="number of episodes of the warm start")
    parser.add_argument(
        "--lost", type=float, default=0.6, help="probability of a random move in the warm start"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="values that override the file's")
    options = parser.parse_intermixed_args()
    start, root, seed = time.monotonic(), options.root, str(options.seed)
    data, model, file = (
        f"{root}/frozen_lake_data",
        f"{root}/frozen_lake_model",
        str(CONFIGS / "frozen_lake.yaml"),
    )
    named = [f"data.{name}={data}/{name}.jsonl" for name in ("train", "eval")]
    own = [*common(root, seed), f"model.path={root}/frozen_lake_sft/hf", *named]
    arguments = with_overrides(parser, options.overrides, file, own)
    print(
        make(Path(data), options.seed, options.maps, options.held_out, options.episodes, options.lost),
        flush=True,
    )
    call("a tiny Qwen3", str(TOOLS / "make_tiny_model.py"), model, "--tokenizer", "bytes", "--seed", seed)
    warm = [*common(root, seed), f"model.path={model}", f"data.train={data}/sft.jsonl"]
    call(
        "warm start on episodes of a mostly random player",
        *CLI,
        "sft",
        "--config",
        str(CONFIGS / "frozen_lake_sft.yaml"),
        *warm,
    )
    call("GRPO", *CLI, "train", "--config", file, *arguments)
    folder = Path(root, "frozen_lake")
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    played = sorted((folder / "eval").glob("step_*_eval.jsonl"))
    show("before GRPO", played[0])
    show("after GRPO", played[-1])
    numbers = {
        "success_before": result["before"]["eval/mean@1"],
        "success_after": result["after"]["eval/mean@1"],
        "train_seconds": result["seconds"],
        "wall_seconds": time.monotonic() - start,
    }
    print(json_text(numbers))


if __name__ == "__main__":
    sys.exit(main())
