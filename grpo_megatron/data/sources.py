"""Loading of all prompts of a run, for training and evaluation."""

import logging
from itertools import count

from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.config.schema import Config
from grpo_megatron.data.order import PromptSource
from grpo_megatron.data.prompts import RecordCheck, as_list, load_prompts
from grpo_megatron.data.tokenizer import PromptTokenizer

logger = logging.getLogger(__name__)


def training_prompts(
    config: Config, tokenizer: PromptTokenizer, check: RecordCheck | None = None
) -> PromptSource:
    """Load the prompts of data.train. Return them as one PromptSource, which hands them out step by step.

    The number of prompts of each source is logged.

    check: function (prompt, place of its record) that raises UserError if the prompt cannot be used, for
        example because the reward cannot score it.

    Raises UserError if a record is invalid, if a prompt is too long and data.overlong_prompts=error, or if a
    source has no prompt left.
    """
    sources, uid = [], 0
    for source in as_list(config.data.train):
        prompts, counts = load_prompts(source, tokenizer, config.data, uid, check)
        uid += len(prompts) + counts["skipped"]
        sources.append(prompts)
        changed = ", ".join(
            f"{count} {what} because of their length" for what, count in counts.items() if count
        )
        logger.info(f"{source}: {len(prompts)} prompts" + (f" ({changed})" if changed else ""))
    return PromptSource(sources, config.run.seed, config.data.shuffle, config.data.train_weights)


def held_out_prompts(
    config: Config, tokenizer: PromptTokenizer, check: RecordCheck | None = None
) -> dict[str, list[Prompt]]:
    """Load the evaluation prompts of data.eval, and return {name of the data set: its prompts}.

    The name comes from the source, such as `test` for gsm8k/test.jsonl. A number is appended to it if an
    earlier data set has the same name, or if it is `average`, which is reserved for the mean over all data
    sets. The prompts stay in memory, because an evaluation samples all of them at once. The result is empty
    without data.eval.

    check: function (prompt, place of its record) that raises UserError if the prompt cannot be used, for
        example because the reward cannot score it.

    Raises UserError if a record is invalid, if a prompt is too long and data.overlong_prompts=error, or if a
    source has no prompt left.
    """
    loaded: list[tuple[str, list[Prompt]]] = []
    for source in as_list(config.data.eval):
        prompts, counts = load_prompts(source, tokenizer, config.data, check=check)
        if any(counts.values()):
            logger.info(
                f"{source}: {counts['skipped']} prompts skipped and {counts['truncated']} truncated because "
                "of their length"
            )
        loaded.append((prompts[0].source, list(prompts)))
    datasets: dict[str, list[Prompt]] = {}
    own = {name for name, _ in loaded}
    for name, prompts in loaded:
        free = name
        if name in (*datasets, "average"):
            numbered = (f"{name}_{number}" for number in count(len(datasets)))
            # The numbered name may be another data set's own name, and would then replace that data set.
            free = next(one for one in numbered if one not in {*own, *datasets})
        datasets[free] = prompts
    return datasets
