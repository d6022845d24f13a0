"""Tasks of verifiers as records: what a record has besides its prompt, and how records are written."""

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.config.rollout import RolloutConfig
from grpo_megatron.errors import UserError
from grpo_megatron.files import json_text
from grpo_megatron.rollout.published.server import run_program

# The field of a record that has the data of its task.
TASK_FIELD = "verifiers"


def must_have_task(prompt: Prompt, where: str) -> None:
    """Raise UserError if a record is no task of verifiers.

    where: place of the record, for the message.
    """
    if not isinstance(prompt.fields.get(TASK_FIELD), dict):
        raise UserError(
            f"{where} has no field {TASK_FIELD!r} with the data of a task; write the records with "
            "`grpo-megatron tasks`"
        )


def write_tasks(rollout: RolloutConfig, out: str, number: int | None) -> int:
    """Write the tasks of the task set that rollout.environment names as records, and return their number.

    out: path of the new file.
    number: number of tasks, the first ones; None: all.

    Raises UserError if the tasks cannot be loaded, or if the file exists or cannot be written.
    """
    if Path(out).exists():
        raise UserError(f"{out} exists already; choose another file, or remove it")
    try:
        folder = tempfile.TemporaryDirectory(prefix=".grpo-tasks-", dir=Path(out).absolute().parent)
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error.strerror}") from error
    with folder as name:
        given, made = f"{name}/tasks.jsonl", f"{name}/records.jsonl"
        run_program(rollout, "tasks", out=given, number=number)
        count = 0
        with open(given, encoding="utf-8") as tasks, open(made, "w", encoding="utf-8") as records:
            for task in map(json.loads, tasks):
                record = {"prompt": list(_messages(task)), "answer": "", TASK_FIELD: task}
                records.write(json_text(record, ensure_ascii=False) + "\n")
                count += 1
        if not count:
            raise UserError(f"rollout.environment={rollout.environment} has no tasks")
        os.replace(made, out)
    return count


def _messages(task: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield what the model reads first, as chat messages. A task without a prompt has its name instead."""
    if task.get("system_prompt"):
        yield {"role": "system", "content": task["system_prompt"]}
    prompt = task.get("prompt") or task.get("name") or f"task {task.get('idx')}"
    yield from [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
