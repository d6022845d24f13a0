"""Convert original GSM8K files to prompts.

    python tools/prepare_gsm8k.py train.jsonl OUT.jsonl [--instruction TEXT]

Input lines have `question` and `answer` (a worked solution that ends with `#### number`). Output lines have
`prompt` (question and instruction), `answer` (the number) and `solution`. The input can also be trained on
directly (configs/gsm8k_cpu.yaml); use this tool if you want to change the prompts.
"""

import argparse
from pathlib import Path

from grpo_megatron.data import read_records
from grpo_megatron.errors import UserError
from grpo_megatron.files import json_text
from grpo_megatron.rewards.answers import hashes, normalise_answer

INSTRUCTION = "Let's think step by step and put the final answer within \\boxed{}."


def prepare(source: str, out: Path, instruction: str) -> int:
    """Write the prompts to `out`, creating its folder if needed, and return their number.

    source: original GSM8K file.
    instruction: text that follows each question.

    Raises UserError if the file cannot be read, or if a record has no final answer.
    """
    lines = []
    for index, record in enumerate(read_records(source, ["question", "answer"])):
        answer = hashes(record["answer"])
        if answer is None:
            raise UserError(
                f"{source}: record {index} has no line '#### number' in its answer; use the original GSM8K "
                "file"
            )
        prompt = f"{record['question']} {instruction}".strip()
        lines.append(
            json_text({"prompt": prompt, "answer": normalise_answer(answer), "solution": record["answer"]})
            + "\n"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("".join(lines), encoding="utf-8")
    return len(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", help="original GSM8K file")
    parser.add_argument("out", type=Path, help="file to write the prompts to")
    parser.add_argument("--instruction", default=INSTRUCTION, help="text that follows each question")
    options = parser.parse_args()
    try:
        print(f"{options.out}: {prepare(options.source, options.out, options.instruction)} prompts")
    except UserError as error:
        parser.exit(2, f"error: {error}\n")


if __name__ == "__main__":
    main()
