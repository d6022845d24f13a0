"""The choice of the engine for a group."""

import random
from collections import Counter

from grpo_megatron.rollout.engine_loads import EngineLoads


def test_it_is_the_first_of_those_with_the_fewest_groups():
    """Groups begin and end, and engines go and come. Each choice is compared with a look at all engines."""
    rng, loads, expected, groups = random.Random(3), EngineLoads(), Counter(), []
    engines = dict.fromkeys(range(12), 0)
    for _ in range(5000):
        what = rng.random()
        if what < 0.5 or not groups:
            chosen = loads.least(engines)
            assert chosen == min(engines, key=lambda index: (expected[index], index))
            groups.append(chosen)
            expected[chosen] += 1
            loads.add(chosen, 1)
        elif what < 0.98:
            ended = groups.pop(rng.randrange(len(groups)))
            expected[ended] -= 1
            loads.add(ended, -1)
        elif what < 0.99 and len(engines) > 1:
            engines = {index: 0 for index in engines if index != rng.choice(list(engines))} or engines
        else:
            engines = dict(sorted((engines | {rng.randrange(12): 0}).items()))
    assert len(loads._heap) < 200


def test_an_engine_that_leaves_the_same_mapping_is_not_chosen():
    loads, engines = EngineLoads(), {0: 0, 1: 0}
    assert loads.least(engines) == 0
    del engines[0]
    assert loads.least(engines) == 1
