"""A surrogate that is defined outside the package."""

from grpo_megatron.algorithm.surrogates import surrogate


@surrogate("doubled")
def doubled_reinforce(terms, options):
    return -2 * terms.advantage * terms.logp, terms.mask & False
