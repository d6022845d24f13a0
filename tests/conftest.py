import re

import pytest
from hypothesis import settings

# First examples pay for imports; timing is not what these tests are about.
settings.register_profile("default", deadline=None)
settings.load_profile("default")


@pytest.fixture(scope="session")
def ranks():
    from tests.ranks import RankPool

    pool = RankPool()
    yield pool
    pool.close()


# Combinations that `make test` leaves to `make test-all`: each differs from one that it runs in a factor that other tests cover.
SLOW = [
    r"test_family\[\w+-True-(tp2|tp2sp|pp2|pp2vpp2|cp2)\]",
    r"test_family\[(mistral|qwen2)-False-(tp2|tp2sp|pp2|pp2vpp2|cp2)\]",
    r"test_family\[(llama3-False-(tp2|tp2sp|pp2)|qwen3-False-(tp2|pp2))\]",
    r"test_fewer_kv_heads_than_tp_ranks\[tp4-(mistral|qwen2)\]",
    r"test_logprobs_equal_transformers\[tied-.*-unpacked\]",
    r"test_round_trip_is_bit_identical\[tied-(tp2|pp2)\]",
    r"test_experts\[(pp2vpp2|cp2|ep2cp2|ep2pp2|tp2sp_as_ep2)-gspo\]",
    r"test_other_factor\[.*(selective recompute|partition of two).*\]",
    r"test_full_kl\[(tp2|dp2)\]",
    r"test_sleeping_and_offloading_change_nothing\[(tp1|tp2|pp2vpp2|dp2 distributed|dp2 overlap|ep2)-optimizer offloaded\]",
    r"test_sleeping_and_offloading_change_nothing\[(tp2|dp2 distributed)-\]",
    r"test_norms_and_biases_do_not_decay\[.*-True\]",
    r"test_a_nan_on_one_replica_drops_the_step_on_all\[.*-advantage\]",
    r"test_too_many_dropped_steps_stop_the_run",
    r"test_bf16_follows_fp32_and_a_checkpoint_continues_it\[distributed-(tp2|pp2|pp2vpp2|cp2)\]",
    r"test_training_follows_the_old_policys_routing\[(tp1|tp2sp|cp2|pp2vpp2)-recompute\]",
    r"test_the_layout_changes_nothing\[.*\{('tp'|'dp').*\]",
    r"test_a_recording_trains_the_same_in_every_layout\[(pipeline_parallel=2|data_parallel=2)\]",
    r"test_(the_entropy_floor|a_mismatch_is_told|resuming_makes_the_same_steps|a_policy_loss_from_a_module_of_ones_own)$",
    r"test_a_mismatch_stops_the_run\[current\]",
    r"test_known_before_or_in_the_forward_masks_the_same_tokens$",
    r"test_a_run_of_the_same_name_is_moved_aside$",
    r"test_a_clipped_step_is_the_references\[(pp2|ep2|ep2 distributed)\]",
    r"test_a_resumed_run_takes_the_configured_rate$",
    r"test_a_rank_that_dies_is_named\[logprobs\]",
    r"test_bf16_follows_fp32_and_a_checkpoint_continues_it\[replicated-(cp2|pp2|dp2)\]",
    r"test_benchmark_runs_small$",
    # Each starts engines of its own, which alone takes half a minute.
    r"test_two_engines_(with_two_tensor_parallel_ranks_each|two_replicas_and_two_evaluation_sets)$",
    r"test_an_engine_in_bf16_by_the_command$",
    r"test_three_steps_on_questions_in_gsm8k_format$",
    r"test_a_checkpoint_of_a_run_converts_to_what_the_run_exported$",
    r"test_an_environment_that_fails_ends_the_run$",
    r"test_a_reward_that_is_not_a_number_stops_the_run$",
    r"test_a_recording_of_turns_trains_the_same$",
    r"test_a_step_in_which_nothing_is_trained_is_dropped$",
]


def pytest_collection_modifyitems(config, items):
    matched = set()
    for item in items:
        for pattern in SLOW:
            if re.match(pattern, item.name):
                matched.add(pattern)
                item.add_marker(pytest.mark.slow)
    # A renamed test would silently come back into `make test`.
    if config.args == config.getini("testpaths") and matched != set(SLOW):
        raise pytest.UsageError(f"patterns of tests/conftest.py that match no test: {sorted(set(SLOW) - matched)}")
