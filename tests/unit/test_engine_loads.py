"""The choice of the engine for a group."""

import random

from grpo_megatron.rollout.engine_loads import EngineLoads, GroupWork, WorkReport

WORK = GroupWork(samples=4, tokens=400)


def test_it_is_the_one_with_the_fewest_tokens_among_those_with_room():
    """Groups begin, report and end, and engines go and come.

    Each choice is compared with a look at all groups of all engines.
    """
    rng, loads, groups, limits = random.Random(3), EngineLoads(16), {}, {}
    engines = dict.fromkeys(range(12), 0)
    choices = set()

    def expected():
        work = dict.fromkeys(engines, (0, 0))
        for engine, left in groups.values():
            if engine in work:
                samples, tokens = work[engine]
                work[engine] = samples + left.samples, tokens + left.tokens
        limit = {index: limits.get(index, 16) for index in engines}
        with_room = [index for index in engines if work[index][0] < limit[index] + limit[index] // 8]
        return min(with_room, key=lambda index: (work[index][1], index), default=None)

    for key in range(8000):
        what = rng.random()
        if what < 0.45 or not groups:
            chosen = loads.best(engines)
            assert chosen == expected()
            choices.add(chosen)
            if chosen is not None:
                groups[key] = chosen, WORK
                loads.start(chosen, key, WORK)
        elif what < 0.75:
            reported = rng.choice(list(groups))
            engine, left = groups[reported]
            if left.samples > 1:
                work = GroupWork(left.samples - 1, left.tokens - 100)
                groups[reported], limits[engine] = (engine, work), rng.randint(8, 16)
                loads.report(reported, WorkReport(work, limits[engine]))
        elif what < 0.98:
            ended = rng.choice(list(groups))
            del groups[ended]
            loads.end(ended)
        elif what < 0.99 and len(engines) > 1:
            gone = rng.choice(list(engines))
            engines = {index: 0 for index in engines if index != gone}
        else:
            engines = dict(sorted((engines | {rng.randrange(12): 0}).items()))
    assert {None, *range(12)} == choices
    assert len(loads._heap) < 200


def test_an_engine_that_leaves_the_same_mapping_is_not_chosen():
    loads, engines = EngineLoads(4), {0: 0, 1: 0}
    assert loads.best(engines) == 0
    del engines[0]
    assert loads.best(engines) == 1


def test_a_group_that_has_begun_gets_an_engine_without_room():
    loads, engines = EngineLoads(4), {0: 0, 1: 0}
    for key, engine in enumerate((0, 0, 1)):
        loads.start(engine, key, WORK)
    assert loads.best(engines) is None
    assert loads.least(engines) == 1


def test_a_report_that_comes_too_late_changes_nothing():
    loads = EngineLoads(4)
    loads.start(0, 0, WORK)
    loads.end(0)
    loads.report(0, WorkReport(GroupWork(3, 300), 1))
    assert loads.best({0: 0}) == 0
