"""Reading of a run's ledger by tests."""

from pathlib import Path

from grpo_megatron.samples.blocks import LEDGER, read_blocks
from grpo_megatron.samples.entries import SampleState


def used_prompts(folder: str | Path) -> dict[int, list[int]]:
    """Return {step: uid of each prompt that it has used up, in order} of all steps that were not undone."""
    found: dict[int, dict[int, int]] = {}
    for block in read_blocks(Path(folder, LEDGER)):
        for entry in block.entries:
            state, step, sample = SampleState(entry["state"]), int(entry["step"]), int(entry["sample"])
            if state == SampleState.rewind:
                found = {earlier: prompts for earlier, prompts in found.items() if earlier <= step}
            elif state == SampleState.admitted and entry["member"] == 0:
                found.setdefault(step, {})[sample] = int(entry["prompt"])
            elif state == SampleState.lost:  # of a group that was aborted, so that its prompt comes again
                found[step].pop(sample, None)
    return {step: list(prompts.values()) for step, prompts in found.items()}
