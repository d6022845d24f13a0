"""The planner's memory and times against numbers by hand, and monotonic relations.

test_planner_published.py compares them with published runs.
"""

from dataclasses import replace

import pytest

from grpo_megatron.capabilities import GPUS
from grpo_megatron.config.load import read_config
from grpo_megatron.model.entries import EngineLayout
from grpo_megatron.model.families import read_architecture
from grpo_megatron.model.parallel_sizes import ParallelSizes
from grpo_megatron.planner.memory import COMMUNICATION, CONTEXT, ENGINE_CONTEXT
from grpo_megatron.planner.plan import plan
from grpo_megatron.planner.rates import ATTENTION, BANDWIDTH, LAYER_SECONDS, LINKS, PRODUCTS
from grpo_megatron.planner.resharding import sync_cost
from grpo_megatron.weights.sync.cost import Machine, cost, on_nodes
from grpo_megatron.weights.sync.plan import Layouts
from tests.unit.reward_models import scored_by
from tests.unit.small_plans import SMALL, moments, planned, small
from tools.plan_recipes import recipe

# What mem_fraction=0.8 is of an H100, and 0.3.
POOL, SMALL_POOL = (int(fraction * GPUS["h100-80g"].memory) for fraction in (0.8, 0.3))


def test_a_dense_model_by_hand():
    """Llama-3.1-70B: TP8, sequence parallel, two stages of 40 layers, eight replicas."""
    found = planned(recipe("llama3_70b_16node"))
    attention, mlp = 2 * 8192 * 8192 + 2 * 8192 * 1024, 3 * 8192 * 28672
    of_a_layer = (attention + mlp) // 8 + 2 * 8192  # norms are on every rank
    # The last stage has the output layer as the first has the embedding, and a norm more.
    elements = 40 * of_a_layer + 128256 * 8192 // 8 + 8192
    state = found.memory.state
    assert (state.parameters, state.gradients, state.optimizer) == (
        2 * elements,
        4 * elements,
        12 * (elements // 8),
    )
    items = moments(found)["training"].items
    # Norms: inputs and outputs. Attention: queries twice, keys, values. MLP: gate, up and their product. Two
    # micro-batches.
    of_a_token = 4 * 8192 // 8 + 2 * 8192 // 8 + 2 * 1024 // 8 + 3 * 28672 // 8
    assert items["activations kept"] == 2 * 8192 * 2 * 40 * of_a_token
    weights = moments(found)["generation"].items["engine: weights"]
    model = 80 * (attention + mlp) + 2 * 128256 * 8192
    assert weights == 2 * (model // 8 + 80 * 2 * 8192 + 8192)
    # A key and a value of one of eight heads in each layer, in bf16.
    assert found.memory.room.tokens == (POOL - weights) // (80 * 2 * 128 * 2)
    assert found.memory.host == {
        "sleeping parameters": 8 * 2 * elements,
        "optimizer": 8 * 12 * (elements // 8),
    }
    assert found.memory.rank_asleep == items[CONTEXT] + items[COMMUNICATION]
    assert moments(found)["generation"].total == found.memory.rank_asleep + POOL + ENGINE_CONTEXT


def test_a_model_with_experts_by_hand():
    """Qwen3-30B-A3B: TP4, experts over EP8, so that they have four replicas and the rest has eight."""
    found = planned(recipe("qwen3_30b_a3b_4node"))
    experts = 48 * 128 * 3 * 2048 * 768 // 8
    attention = 2 * 2048 * 4096 + 2 * 2048 * 512
    dense = 48 * (attention // 4 + 2 * 2048 + 2 * 128 + 128 * 2048) + 2 * 151936 * 2048 // 4 + 2048
    state = found.memory.state
    assert state.parameters == 2 * (dense + experts)
    assert state.gradients == 4 * (dense + experts)
    assert state.optimizer == 12 * (dense // 8 + experts // 4)


def test_a_pass_on_one_gpu_by_hand():
    """6 FLOPs per weight and token, plus attention's, and nothing sent: Qwen3-0.6B without parallelism."""
    found = small()
    layer = 2 * 1024 * 2048 + 2 * 1024 * 1024 + 3 * 1024 * 3072
    weights = 28 * layer + 1024 * 151936
    sequences, length = 32 * 8, 512
    attention = 4 * 28 * 16 * 128 * length * (length + 1) / 2
    products = 2 * weights * length
    seconds = 3 * sequences * (products / (PRODUCTS * 989e12) + attention / (ATTENTION * 989e12))
    assert found.times.seconds["training"] == pytest.approx(seconds, rel=1e-3)
    assert found.times.mfu == pytest.approx(
        3 * sequences * (products + attention) / seconds / 989e12, rel=1e-3
    )
    assert found.times.tokens == sequences * length
    assert found.times.tokens_per_second_per_gpu == pytest.approx(sequences * length / found.times.step / 2)


def test_decoding_on_one_gpu_by_hand():
    """256 responses at once read weights and cache in each of 512 steps.

    On average, a response takes part in half of the steps.
    """
    found = small()
    weights = found.memory.engine_weights
    cache = 128 * (256 + 128) * 28 * 2 * 8 * 128 * 2
    step = (weights + cache) / (BANDWIDTH * 3.35e12) + 28 * LAYER_SECONDS
    prefill = found.times.seconds["generation"] - 512 * step
    assert 0 < prefill < 0.05 * found.times.seconds["generation"]


def test_a_reward_model_by_hand(tmp_path):
    """A model like Qwen3-0.6B, with a row in place of the output projection.

    Its stages are equally large, and it is in bf16, whatever the policy's are. Its weights are on a GPU while
    it scores, and always in the host's memory.
    """
    layer = 2 * 1024 * 2048 + 2 * 1024 * 1024 + 3 * 1024 * 3072
    of_a_stage, row = 14 * (layer + 2 * 1024 + 2 * 128), 2 * 1024
    stages = ("megatron.pipeline_parallel=2", "megatron.pipeline_layers=[13,15]", "megatron.precision=fp8")
    stages += ("train.constant_length_packs=true", "megatron.offload_folder=/nvme")
    found = small(*stages, *scored_by(tmp_path))
    # Two of the node's GPUs train; on the others is an engine, or nothing.
    assert found.memory.host == {"reward model": 2 * 2 * (of_a_stage + 151936 * 1024)}
    assert "reward model" not in moments(found)["training"].items
    scoring, fullest = moments(found)["scoring"], (of_a_stage + 151936 * 1024, of_a_stage + row)
    assert scoring.items["reward model"] == 2 * fullest[scoring.stage]
    assert all(scoring.items[item] > 0 for item in ("parameters", "gradients", "optimizer"))
    # One layer has norms in and out, queries twice, keys and values twice, both once more before their norms,
    # and the MLP; then what is gathered for it. Nothing is kept, and there are no gradients.
    kept = 4 * 1024 + 2 * 2048 + 2 * 1024 + (2048 + 1024) + 3 * 3072
    micro_batch = read_config(None, [*SMALL]).train.max_tokens_per_micro_batch
    assert scoring.items["layer being computed"] == 2 * micro_batch * (kept + 4 * 1024)
    assert "scoring" not in moments(small())


def test_a_reward_model_takes_its_transfer_and_a_forward_pass_without_an_output_layer(tmp_path):
    found, length = small(*scored_by(tmp_path)), 512
    layer = 2 * 1024 * 2048 + 2 * 1024 * 1024 + 3 * 1024 * 3072
    products, attention = 2 * (28 * layer + 1024) * length, 4 * 28 * 16 * 128 * length * (length + 1) / 2
    computing = 32 * 8 * (products / (PRODUCTS * 989e12) + attention / (ATTENTION * 989e12))
    weights = 2 * (28 * (layer + 2 * 1024 + 2 * 128) + 151936 * 1024 + 2 * 1024)
    assert found.times.seconds["scoring"] == pytest.approx(computing + weights / (LINKS * 64e9), rel=1e-6)
    assert found.times.step == pytest.approx(small().times.step + found.times.seconds["scoring"])


def test_a_pipeline_idles_by_its_bubble():
    """Two stages are equally busy except for the output layer.

    There are four micro-batches of two sequences each.
    """
    sizes = (
        "train.max_tokens_per_micro_batch=1024",
        "data.train_batch_size=8",
        "train.ppo_mini_batch_size=8",
        "rollout.n=1",
    )
    whole, staged = (
        small(*sizes),
        small(*sizes, "megatron.pipeline_parallel=2", "train.constant_length_packs=true"),
    )
    layers, head = 28 * (2 * 1024 * 2048 + 2 * 1024 * 1024 + 3 * 1024 * 3072), 1024 * 151936
    busiest = (layers / 2 + head) / (layers + head)
    ratio = staged.times.seconds["training"] / whole.times.seconds["training"]
    assert ratio == pytest.approx(busiest * (1 + 1 / 4), rel=0.05)


def test_a_virtual_pipeline_shrinks_the_bubble():
    """A stage of two chunks waits for half a stage when the pipeline fills and drains (arXiv:2104.04473,
    section 2.2).
    """
    sizes = (
        "train.max_tokens_per_micro_batch=1024",
        "data.train_batch_size=8",
        "train.ppo_mini_batch_size=8",
        "rollout.n=1",
    )
    staged = (*sizes, "megatron.pipeline_parallel=2", "train.constant_length_packs=true")
    plain, virtual = small(*staged), small(*staged, "megatron.virtual_pipeline=2")
    ratio = virtual.times.seconds["training"] / plain.times.seconds["training"]
    assert ratio == pytest.approx((1 + 1 / 8) / (1 + 1 / 4), rel=0.01)


@pytest.mark.parametrize(
    ("change", "what", "sign"),
    [
        ("megatron.data_parallel=2", "training", -1),
        ("megatron.recompute=full", "training", 1),
        ("rollout.engine.num_engines=2", "generation", -1),
        ("rollout.max_response_length=1024", "generation", 1),
        ("rollout.n=16", "generation", 1),
        ("train.old_logprobs=recompute", "old log-probs", 1),
        ("algorithm.use_kl_loss=true", "reference log-probs", 1),
        ("optimizer.offload=true", "gradients, optimizer", 1),
        ("train.ppo_mini_batch_size=8", "gradients, optimizer", 1),
        ("train.ppo_epochs=2", "training", 1),
    ],
)
def test_times_follow_what_is_to_be_done(change, what, sign):
    extra = ["train.old_logprobs=rollout"] if change.startswith("train.ppo") else []
    before, after = small(*extra), small(*extra, change)
    assert sign * (after.times.seconds.get(what, 0) - before.times.seconds.get(what, 0)) > 0


def test_a_step_beside_generation_is_as_long_as_the_longer_side():
    apart = ("cluster.placement=separate", "train.old_logprobs=rollout", "megatron.sleep=false")
    taken, beside = small(*apart).times, small(*apart, "rollout.staleness=1").times
    generation, rest = taken.seconds["generation"], taken.step - taken.seconds["generation"]
    assert (taken.of_engines, taken.of_trainer) == (generation, pytest.approx(rest))
    assert beside.of_trainer == pytest.approx(rest)
    assert beside.step == pytest.approx(max(beside.of_engines, rest))
    assert beside.tokens_per_second_per_gpu > taken.tokens_per_second_per_gpu


def test_further_batches_fill_the_slots_of_engines_that_wait_for_the_longest_response():
    """The gain is larger for responses of very different lengths. It has a limit: the engine's speed."""

    def seconds(staleness, response):
        changes = ["cluster.placement=separate", "train.old_logprobs=rollout", "megatron.sleep=false"]
        config = read_config(None, [*SMALL, *changes, f"rollout.staleness={staleness}"])
        return planned(config, prompt=256, response=response).times.of_engines

    for response in (50, 200):
        of_staleness = [seconds(staleness, response) for staleness in (0, 1, 2, 8)]
        assert of_staleness == sorted(of_staleness, reverse=True)
        assert of_staleness[0] < 9 * of_staleness[-1]
    assert seconds(0, 50) / seconds(2, 50) > seconds(0, 200) / seconds(2, 200) > 1


@pytest.mark.parametrize(
    ("change", "moment", "item", "sign"),
    [
        ("megatron.recompute=full", "training", "activations kept", -1),
        ("train.max_tokens_per_micro_batch=32768", "training", "activations kept", 1),
        ("train.max_tokens_per_micro_batch=32768", "training", "output layer", 1),
        ("megatron.precision=fp8", "training", "FP8 copies", 1),
        ("optimizer.offload=true", "training", "optimizer", -1),
        ("optimizer.offload=true", "optimizer step", "optimizer", 0),
        ("ref.offload=false algorithm.use_kl_loss=true", "optimizer step", "reference", 1),
        ("rollout.engine.dtype=float32", "generation", "engine: weights", 1),
        ("algorithm.use_kl_loss=true algorithm.kl_loss_type=full", "training", "output layer", 1),
        ("algorithm.use_kl_loss=true", "training", "output layer", 0),
    ],
)
def test_memory_follows_what_is_kept(change, moment, item, sign):
    before, after = (moments(found)[moment].items.get(item, 0) for found in (small(), small(*change.split())))
    assert (after > before) - (after < before) == sign


def test_copies_in_fp8_stay_until_ranks_sleep_or_make_room_for_engines(tmp_path):
    def with_copies(*overrides):
        found = small("megatron.precision=fp8", *scored_by(tmp_path), *overrides)
        of_all = {name: moment.items.get("FP8 copies") for name, moment in moments(found).items()}
        assert set(of_all.values()) <= {None, found.memory.state.parameters}
        return {name for name, copies in of_all.items() if copies}

    assert with_copies() == {"training", "optimizer step", "weight sync", "scoring"}
    assert with_copies("megatron.sleep=true") == {"training", "optimizer step", "weight sync"}
    beside = ("cluster.placement=colocated", "rollout.engine.mem_fraction=0.3")
    for colocated in (beside, (*beside, "megatron.sleep=true")):
        assert with_copies(*colocated) == {"training", "optimizer step"}


def test_the_exact_kl_by_hand():
    """A step of two samples of 1024 tokens on the last of two stages, where two ranks share the positions.

    The bound allows half of it on the device.
    """
    sizes = (
        "data.train_batch_size=1",
        "train.ppo_mini_batch_size=1",
        "rollout.n=2",
        "data.max_prompt_length=512",
    )
    sizes += (
        "rollout.max_response_length=512",
        "megatron.pipeline_parallel=2",
        "train.constant_length_packs=true",
    )
    sizes += (
        "megatron.tensor_parallel=2",
        "megatron.sequence_parallel=true",
        "train.max_tokens_per_micro_batch=1024",
    )
    of_a_rank = 2 * 1024 * 1024 * 2 // 2
    exact = (
        *sizes,
        "algorithm.use_kl_loss=true",
        "algorithm.kl_loss_type=full",
        f"ref.hidden_gib={of_a_rank / 2**31}",
        "model.fp32_head=true",  # so that ranks of the last stage have the most memory
    )
    found, on_device = small(*exact), small(*exact, "ref.offload=false")
    # Ranks of the last stage alone have any: two of the four.
    assert found.memory.host["reference's hidden states"] == 2 * of_a_rank // 2
    assert found.memory.host["reference"] == 4 * found.memory.state.parameters
    for name in ("training", "optimizer step", "weight sync"):
        assert moments(found)[name].items["reference's hidden states"] == of_a_rank // 2
    # The reference's half of the output projection, for the time of the passes.
    head, beside = (moments(each)["training"].items["output layer"] for each in (found, on_device))
    assert head - beside == 2 * 151936 // 2 * 1024
    assert "reference's hidden states" not in small(*sizes, "algorithm.use_kl_loss=true").memory.host
    assert "reference's hidden states" not in small(*exact, "ref.hidden_gib=1").memory.host


def test_a_cache_in_fp8_has_twice_the_tokens():
    assert small("rollout.engine.kv_cache_dtype=fp8_e4m3").memory.room.tokens == pytest.approx(
        2 * small().memory.room.tokens, abs=1
    )
    assert small("rollout.engine.max_total_tokens=4096").memory.room.tokens == 4096


@pytest.mark.parametrize(
    ("changes", "ranks"),
    [
        ([], 8),
        (["rollout.engine.num_engines=1"], 4),
        (["cluster.placement=separate"], 0),  # engines have nodes of their own
        (["moe.routing_replay=off"], None),
    ],
)
def test_engines_keep_the_experts_of_cached_tokens_on_the_host(changes, ranks):
    """They take 3.3 GB of pinned memory per rank, which was in no plan."""
    arguments = [
        "model.path=configs/models/qwen3-30b-a3b",
        "cluster.nodes=8",
        "megatron.data_parallel=8",
        *changes,
    ]
    config = read_config("configs/qwen3_30b_a3b_4node.yaml", arguments)
    found = plan(config, read_architecture(config.model.path), with_sync=False).memory
    item = found.host.get("experts of cached tokens")
    assert item == (None if ranks is None else ranks * found.room.tokens * 48 * 8 * 4)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_an_output_layer_in_float32_has_its_price_in_engines(tp):
    """SGLang converts all of it in every decoding step."""
    layout = ("cluster.placement=separate", f"rollout.engine.tensor_parallel={tp}")
    usual, exact = small(*layout), small(*layout, "model.fp32_head=true")
    items = moments(exact)["generation"].items
    assert items["engine: output layer in float32"] == 4 * 151936 * 1024 // tp
    assert exact.memory.fullest.total >= usual.memory.fullest.total
    assert "engine: output layer in float32" not in moments(usual)["generation"].items
    assert exact.times.seconds["generation"] > usual.times.seconds["generation"]
    assert exact.times.seconds["training"] == usual.times.seconds["training"]


def test_colocated_engines_that_do_not_take_turns_are_beside_the_trainer_all_the_time():
    colocated = ("cluster.placement=colocated", "rollout.engine.mem_fraction=0.3")
    beside, in_turns = small(*colocated), small(*colocated, "megatron.sleep=true")
    for name, moment in moments(beside).items():
        of_engines = {item: size for item, size in moment.items.items() if item.startswith("engine")}
        assert sum(of_engines.values()) == SMALL_POOL + ENGINE_CONTEXT
        assert moment.items["parameters"] > 0, name
    assert "engine: KV cache" not in moments(in_turns)["training"].items
    assert "parameters" not in moments(in_turns)["generation"].items
    assert moments(in_turns)["weight sync"].items["engine: weights"] == in_turns.memory.engine_weights


def full_cost(config, arch):
    """Return the cost with every expert counted by itself."""
    sizes, engine = (
        ParallelSizes.from_config(config.megatron),
        EngineLayout.from_config(config.rollout.engine),
    )
    layouts = on_nodes(Layouts(arch, sizes, engine, config.rollout.engine.num_engines), 8, colocated=True)
    return cost(layouts, Machine(50.0, LINKS * 450), config.weight_sync.bucket_bytes).seconds


def test_a_weight_sync_is_that_of_its_own_cost_model():
    """It is exact for a dense model. Fewer and wider experts cost what many do."""
    config = recipe("qwen3_8b_1node")
    arch = read_architecture(config.model.path)
    assert sync_cost(config, arch).seconds == pytest.approx(full_cost(config, arch))
    config = recipe("qwen3_30b_a3b_4node")
    arch = read_architecture(config.model.path)
    arch = replace(arch, num_layers=2, moe=replace(arch.moe, layers=(True, True)))
    assert sync_cost(config, arch).seconds == pytest.approx(full_cost(config, arch), rel=0.1)
