"""Check of a configuration: the limits of each value, and the rules about several keys.

All violations are reported at once. Checks that read the model's config.json are in preflight.model.
"""

from omegaconf import MISSING

from grpo_megatron.capabilities import Capabilities
from grpo_megatron.config.command import Command
from grpo_megatron.config.keys import default_of
from grpo_megatron.config.load import flat, known_keys
from grpo_megatron.config.options import limits_of
from grpo_megatron.config.schema import Config
from grpo_megatron.model.parallel_sizes import ParallelSizes
from grpo_megatron.preflight.algorithm_rules import ALGORITHM
from grpo_megatron.preflight.cluster_rules import CLUSTER, known_capabilities
from grpo_megatron.preflight.engine_rules import ENGINE
from grpo_megatron.preflight.layout import SIZES, SIZES_OF_MODEL, layout_violations
from grpo_megatron.preflight.lora_rules import LORA
from grpo_megatron.preflight.mismatch_rules import MISMATCH
from grpo_megatron.preflight.precision_rules import PRECISION
from grpo_megatron.preflight.reward_rules import REWARD
from grpo_megatron.preflight.rollout_rules import ROLLOUT
from grpo_megatron.preflight.rule import Rule
from grpo_megatron.preflight.training_rules import TRAINING
from grpo_megatron.preflight.weight_sync_rules import WEIGHT_SYNC


def all_rules() -> list[Rule]:
    """Return the rules of all books, for `config explain`."""
    return [
        rule
        for book in (
            TRAINING,
            PRECISION,
            LORA,
            ROLLOUT,
            REWARD,
            ENGINE,
            SIZES,
            SIZES_OF_MODEL,
            CLUSTER,
            WEIGHT_SYNC,
            ALGORITHM,
            MISMATCH,
        )
        for rule in book.rules
    ]


def violations(
    config: Config, command: Command = Command.train, capabilities: Capabilities | None = None
) -> list[str]:
    """Return one sentence for each violation of a limit or a rule, naming the keys.

    capabilities: capabilities of the machines that will run the configuration; None: those known without
        asking the Ray cluster.
    """
    out = out_of_limits(config)
    keys = frozenset(out)
    found = [sentence for sentences in out.values() for sentence in sentences]
    found += TRAINING.violations(config, command=command, out_of_limits=keys)
    found += PRECISION.violations(config, command=command, out_of_limits=keys)
    found += LORA.violations(config, command=command, out_of_limits=keys)
    found += ROLLOUT.violations(config, command=command, out_of_limits=keys)
    found += REWARD.violations(config, command=command, out_of_limits=keys)
    found += ENGINE.violations(config, command=command, out_of_limits=keys)
    found += (
        layout_violations(ParallelSizes.from_config(config.megatron), out_of_limits=keys)
        if command.trains
        else []
    )
    known = capabilities or known_capabilities(config)
    found += CLUSTER.violations(config, known, command=command, out_of_limits=keys)
    found += WEIGHT_SYNC.violations(config, command=command, out_of_limits=keys)
    found += ALGORITHM.violations(config, command=command, out_of_limits=keys)
    return found + MISMATCH.violations(config, command=command, out_of_limits=keys)


def out_of_limits(config: Config) -> dict[str, list[str]]:
    """Return {key: sentences} of the values outside the limits of their own key, for any command."""
    known = known_keys()
    found = {}
    for key, value in flat(config).items():
        # missing_keys reports a required key without a value.
        if default_of(known[key]) == MISSING and value in ("", MISSING):
            continue
        problems = list(limits_of(known[key]).problems(key, value))
        if problems:
            found[key] = problems
    return found
