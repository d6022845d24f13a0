"""Make the quickstart's task: two-digit addition and subtraction with a short worked answer.

    python tools/make_arithmetic.py OUT_DIR [--seed S] [--held-out N] [--wrong P] [--copies C]

Writes these files to OUT_DIR:

    train.jsonl             prompts with answers
    eval.jsonl              held-out prompts with answers
    sft.jsonl               responses of a noisy teacher
    preferences.jsonl       pairs of a right (preferred) and a wrong response
    preferences_eval.jsonl  one such pair for each held-out problem

The teacher's steps are right, but in a share P of its responses the final answer is off by one or ten. Each
problem occurs C times in sft.jsonl with different errors, so that the noise cannot be memorised. In
preferences.jsonl it occurs half as often.

No held-out pair of operands, in either order, occurs in train.jsonl, sft.jsonl or preferences.jsonl.
"""

import argparse
import random
import re
from pathlib import Path

from grpo_megatron.files import json_text


def problem(a: int, b: int, sign: str, slips: tuple[int, int] = (0, 0)) -> tuple[str, str, int]:
    """Return (prompt, worked steps, answer), such as ("12+34", "2+4=6,1+3+0=4", 46).

    Subtraction requires a >= b.

    slips: (error of the ones, error of the tens), which are added to the results of these two steps. The
        computation goes on with the wrong results.
    """
    if sign == "+":
        ones = a % 10 + b % 10 + slips[0]
        tens = a // 10 + b // 10 + ones // 10 + slips[1]
        steps = f"{a % 10}+{b % 10}={ones},{a // 10}+{b // 10}+{ones // 10}={tens}"
    else:
        borrow = int(a % 10 < b % 10)
        ones = a % 10 + 10 * borrow - b % 10 + slips[0]
        tens = a // 10 - b // 10 - borrow + slips[1]
        steps = f"{a % 10 + 10 * borrow}-{b % 10}={ones},{a // 10}-{b // 10}-{borrow}={tens}"
    return f"{a}{sign}{b}", steps, 10 * tens + ones % 10


def noisy(answer: int, rng: random.Random, wrong: float) -> int:
    if rng.random() >= wrong:
        return answer
    return rng.choice([value for value in (answer - 10, answer - 1, answer + 1, answer + 10) if value >= 0])


def preference(prompt: str, steps: str, answer: int, rng: random.Random) -> dict[str, str]:
    """Return a record with a right response, which is preferred, and a wrong one.

    The wrong response has an answer that does not follow from its steps, or a slip in a step, or one wrong
    digit. All three kinds are needed, because training does not penalise an error that no rejected response
    contains.
    """
    right = f"{steps} #{answer}"
    kind = rng.randrange(3)
    if kind == 0:
        wrong = f"{steps} #{noisy(answer, rng, wrong=1.0)}"
    elif kind == 1:
        a, sign, b = re.split(r"([+-])", prompt)
        slip = rng.choice([-2, -1, 1, 2])
        _, slipped, follows = problem(int(a), int(b), sign, rng.choice([(slip, 0), (0, slip)]))
        wrong = f"{slipped} #{follows}"
    else:
        place = rng.choice([i for i, character in enumerate(right) if character.isdigit()])
        wrong = right[:place] + rng.choice("0123456789".replace(right[place], "")) + right[place + 1 :]
    return {"prompt": prompt, "chosen": right, "rejected": wrong}


def make(out: Path, seed: int, held_out: int, wrong: float, copies: int) -> dict[str, int]:
    rng = random.Random(seed)
    pairs = [(a, b) for a in range(10, 100) for b in range(10, a + 1)]
    rng.shuffle(pairs)
    out.mkdir(parents=True, exist_ok=True)
    # The preferences have a random generator of their own, so that they do not change the other files.
    counts, of_preferences = {}, random.Random(f"preferences {seed}")
    for name, chosen in (("eval", pairs[:held_out]), ("train", pairs[held_out:])):
        problems = []
        for a, b in chosen:
            signs = [rng.choice("+-")] if name == "eval" else "+-"
            problems += [
                problem(*((a, b) if sign == "-" or rng.random() < 0.5 else (b, a)), sign) for sign in signs
            ]
        rng.shuffle(problems)
        counts[name] = write(
            out / f"{name}.jsonl", [{"prompt": p, "answer": str(answer)} for p, _, answer in problems]
        )
        compared = f"preferences{'_eval' if name == 'eval' else ''}"
        times = 1 if name == "eval" else max(1, copies // 2)
        judged = [preference(*one, of_preferences) for _ in range(times) for one in problems]
        counts[compared] = write(out / f"{compared}.jsonl", judged)
        if name == "train":
            taught = [
                {"prompt": p, "response": f"{steps} #{noisy(answer, rng, wrong)}"}
                for _ in range(copies)
                for p, steps, answer in problems
            ]
            counts["sft"] = write(out / "sft.jsonl", taught)
    return counts


def write(path: Path, records: list[dict]) -> int:
    path.write_text("".join(json_text(record) + "\n" for record in records), encoding="utf-8")
    return len(records)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="folder to write the data to")
    parser.add_argument("--seed", type=int, default=0, help="seed of the problems and answers")
    parser.add_argument("--held-out", type=int, default=512, help="held-out pairs of operands")
    parser.add_argument(
        "--wrong", type=float, default=0.65, help="share of the teacher's answers that are wrong"
    )
    parser.add_argument("--copies", type=int, default=8, help="how often the teacher answers each problem")
    options = parser.parse_args()
    print(json_text(make(options.out, options.seed, options.held_out, options.wrong, options.copies)))


if __name__ == "__main__":
    main()
