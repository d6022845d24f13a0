"""Helpers for tests that ask which rules of the algorithm a configuration breaks."""

from grpo_megatron.preflight.algorithm_rules import ALGORITHM
from grpo_megatron.preflight.mismatch_rules import MISMATCH


def algorithm_violations(config) -> list[str]:
    return ALGORITHM.violations(config) + MISMATCH.violations(config)
