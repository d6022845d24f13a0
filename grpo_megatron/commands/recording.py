"""`grpo-megatron recording`: prints recorded samples with their tokens as JSON."""

from typing import Any

from grpo_megatron.batch.arrays import read, values_of
from grpo_megatron.batch.sample import Group
from grpo_megatron.errors import UserError
from grpo_megatron.files import json_text
from grpo_megatron.rollout.recording.replay import Replay
from grpo_megatron.rollout.recording.rows import group_row


def recording(path: str, step: int | None = None) -> int:
    """Print the steps of a recording, one line of JSON each. Return the exit status, which is 0.

    path: the recording that a run with rollout.record=PATH has written, also with an earlier version.
    step: the only step to print; None: all.

    Raises UserError if the recording cannot be read, or does not have the step.
    """
    replay = Replay(path)
    if step is not None and step not in replay.steps:
        raise UserError(f"{path} contains {len(replay.steps)} steps, but not step {step}")
    for shown in replay.steps if step is None else [step]:
        print(json_text({"step": shown, "groups": [_with_arrays(group) for group in replay.read(shown)]}))
    return 0


def _with_arrays(group: Group) -> dict[str, Any]:
    """Return a group as values for JSON. Each sample has its texts, and its arrays as lists.

    A sample has prompt_ids only if they differ from the token ids of the group's prompt.
    """
    found, texts = [], values_of([sample.texts for sample in group.samples])
    for arrays, own in zip(read([sample.handle for sample in group.samples]), texts, strict=True):
        lists = {name: None if value is None else value.tolist() for name, value in vars(arrays).items()}
        if lists["prompt_ids"] == group.prompt.ids.tolist():
            del lists["prompt_ids"]
        found.append(lists | {"response_text": own.response, "scored_text": own.scored})
    return group_row(group, found)
