"""All rules about a configuration, and the check that lists the broken ones."""

from dataclasses import replace

from grpo_megatron.capabilities import Capabilities
from grpo_megatron.config.command import Command
from grpo_megatron.config.schema import Config
from grpo_megatron.model.parallel_sizes import ParallelSizes
from grpo_megatron.preflight.algorithm_rules import ALGORITHM
from grpo_megatron.preflight.cluster_rules import CLUSTER, known_capabilities
from grpo_megatron.preflight.engine_rules import ENGINE
from grpo_megatron.preflight.layout import SIZES, SIZES_OF_MODEL
from grpo_megatron.preflight.lora_rules import LORA
from grpo_megatron.preflight.mismatch_rules import MISMATCH
from grpo_megatron.preflight.precision_rules import PRECISION
from grpo_megatron.preflight.reward_rules import REWARD
from grpo_megatron.preflight.rollout_rules import ROLLOUT
from grpo_megatron.preflight.rule import Rule
from grpo_megatron.preflight.training_rules import TRAINING
from grpo_megatron.preflight.weight_sync_rules import WEIGHT_SYNC

# The books whose checks take a configuration alone.
_BOOKS = (TRAINING, PRECISION, LORA, ROLLOUT, REWARD, ENGINE, WEIGHT_SYNC, ALGORITHM, MISMATCH)


def all_rules() -> list[Rule]:
    """Return the rules of all rule books, for `config explain`."""
    return [rule for book in (*_BOOKS, SIZES, SIZES_OF_MODEL, CLUSTER) for rule in book.rules]


def violations(
    config: Config,
    command: Command = Command.train,
    capabilities: Capabilities | None = None,
    refused: frozenset[str] = frozenset(),
) -> list[str]:
    """Return one sentence for each rule that a configuration breaks. The sentence names the keys.

    Rules that need the model's config.json are not checked here, but by preflight.model.model_violations.

    command: the command that will run. Rules that do not apply to it are skipped.
    capabilities: what is known about the machines that will run the configuration. None: what is known
        without asking a Ray cluster.
    refused: keys whose values the schema refuses, so that `config` has their defaults instead. Rules that
        read these keys are skipped.
    """
    if command == Command.eval:  # it always generates with engines, and ignores rollout.replay
        config = replace(config, rollout=replace(config.rollout, replay=None))
    found = [
        sentence for book in _BOOKS for sentence in book.violations(config, command=command, refused=refused)
    ]
    if command.trains:
        found += SIZES.violations(ParallelSizes.from_config(config.megatron), refused=refused)
    known = capabilities or known_capabilities(config)
    return found + CLUSTER.violations(config, known, command=command, refused=refused)
