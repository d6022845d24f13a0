"""Recorded rollouts: every step's groups as one line of JSON, to be trained on again.

JSON and not pickle: loading a recording runs no code. float32 log-probs survive exactly (they are
written as float64, whose shortest decimal form reads back the same).
"""

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np

from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.batch.sample import Group, Sample, WeightSpan
from grpo_megatron.errors import UserError
from grpo_megatron.paths import file_problem

_FORMAT = "grpo_megatron.rollout"
_VERSION = 1


class Recorder:
    """Writes a recording; a resumed run keeps the steps up to the one it continues after."""

    def __init__(self, path: str, resumed: int = 0):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        kept = []
        if resumed and Path(path).is_file():
            lines = Replay(path).lines
            kept = [lines[step] for step in sorted(lines) if step <= resumed]
        self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115 - held for the run
        for line in [json.dumps({"format": _FORMAT, "version": _VERSION}), *kept]:
            self._file.write(line + "\n")
        self._file.flush()

    def write(self, step: int, groups: list[Group]) -> None:
        self._file.write(json.dumps({"step": step, "groups": [_group_to_json(group) for group in groups]}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class Replay:
    """Hands out recorded steps by their number. lines: step -> its line of JSON."""

    def __init__(self, path: str):
        if file_problem(path):
            raise UserError(f"rollout.replay: {path} {file_problem(path)}")
        self._path = path
        try:
            header, *lines = Path(path).read_text(encoding="utf-8").splitlines() or [""]
        except UnicodeDecodeError as error:
            raise UserError(f"rollout.replay: {path} is not a recording of version {_VERSION} (no text)") from error
        if self._parse(header, 1) != {"format": _FORMAT, "version": _VERSION}:
            raise UserError(f"rollout.replay: {path} is not a recording of version {_VERSION}")
        self.lines: dict[int, str] = {}
        for number, line in enumerate(lines, start=2):
            step = self._parse(line, number).get("step")
            if not isinstance(step, int) or step in self.lines:
                raise UserError(f"rollout.replay: {path}:{number} is damaged (step {step!r} is missing or there twice)")
            self.lines[step] = line

    def _parse(self, line: str, number: int) -> dict:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            if number == 1:
                return {}
            raise UserError(f"rollout.replay: {self._path}:{number} is damaged ({error})") from error
        return value if isinstance(value, dict) else {}

    def read(self, step: int) -> list[Group]:
        """Groups of the step (counted from 1). Raises UserError if it is not there, or broken."""
        if step not in self.lines:
            raise UserError(
                f"rollout.replay: {self._path} holds {len(self.lines)} steps, but not step {step}; lower run.total_steps"
            )
        try:
            return [_group_from_json(group) for group in json.loads(self.lines[step])["groups"]]
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"rollout.replay: {self._path}: step {step} is damaged ({type(error).__name__}: {error})"
            ) from error


def _group_to_json(group: Group) -> dict:
    samples = []
    for sample in group.samples:
        item = {name: value for name, value in vars(sample).items() if name != "prompt_ids"}
        for name in ("response_ids", "loss_mask", "rollout_logprobs"):
            item[name] = item[name].tolist()
        item["weight_spans"] = [asdict(span) for span in sample.weight_spans]
        item["routing"] = None if sample.routing is None else sample.routing.tolist()
        samples.append(item)
    prompt = {**vars(group.prompt), "ids": group.prompt.ids.tolist()}
    return {"group_id": group.group_id, "prompt": prompt, "samples": samples}


def _group_from_json(item: dict) -> Group:
    prompt = Prompt(**{**item["prompt"], "ids": np.array(item["prompt"]["ids"], dtype=np.int32)})
    samples = []
    for values in item["samples"]:
        arrays = {
            "response_ids": np.array(values["response_ids"], dtype=np.int32),
            "loss_mask": np.array(values["loss_mask"], dtype=np.bool_),
            "rollout_logprobs": np.array(values["rollout_logprobs"], dtype=np.float32),
        }
        if values.get("routing") is not None:
            arrays["routing"] = np.array(values["routing"], dtype=np.int16)
        spans = tuple(WeightSpan(**span) for span in values["weight_spans"])
        samples.append(Sample(**{**values, **arrays, "weight_spans": spans, "prompt_ids": prompt.ids}))
    return Group(item["group_id"], prompt, tuple(samples))
