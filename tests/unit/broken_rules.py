"""Helpers for tests that ask which rules of the algorithm a configuration breaks."""

from grpo_megatron.algorithm.columns import needs_columns
from grpo_megatron.preflight.algorithm_rules import ALGORITHM
from grpo_megatron.preflight.mismatch_rules import MISMATCH


@needs_columns("ref_logp")
def beside_the_reference(inputs, options):
    """Stand in for an advantage estimator. Nothing calls it."""


def algorithm_violations(config) -> list[str]:
    return ALGORITHM.violations(config) + MISMATCH.violations(config)
