"""Mapping of verl's keys to those of grpo_megatron: the engine that generates responses."""

from typing import Any

from grpo_megatron.importers.converters import absorbed, choice, fixed, must_be_off, top_k_off, truth
from grpo_megatron.importers.mapping import CannotCarry, Convert, Source, becomes, dropped, same, trains
from grpo_megatron.importers.verl_tools import functions, has_turns, other_turns, tools
from grpo_megatron.importers.verl_trainer import ACTOR, MODEL, ROLLOUT

# Each training engine of verl reads the key in its own section. Engines without a section read the first key.
REPLAY_MODES = tuple(f"{ACTOR}.{section}router_replay.mode" for section in ("", "megatron.", "veomni."))


def _validation(value: Any, source: Source) -> dict[str, Any]:
    if truth(value):
        return {"eval.temperature": source.number(f"{ROLLOUT}.val_kwargs.temperature"), "eval.greedy": False}
    return {"eval.temperature": 0.0, "eval.n": 1, "eval.greedy": False}


def _agent_loop(value: Any, source: Source) -> dict[str, Any]:
    if value == "single_turn_agent":
        return {}
    return (has_turns if value == "tool_agent" else other_turns)(value, source)


def _max_turns(value: Any, source: Source) -> dict[str, Any]:
    return (
        {"rollout.max_turns": value}
        if value is not None and truth(source[f"{ROLLOUT}.multi_turn.enable"])
        else {}
    )


def _must_equal(length: str) -> Convert:
    """Return a function that checks that a limit of verl equals a second limit of verl.

    grpo_megatron has one key for both limits, which is set from the second limit. If the limits are equal, or
    the first is null, the function returns {}: no key is set. If they differ, it raises CannotCarry.

    length: verl's key of the second limit, such as `data.max_prompt_length`.
    """

    def convert(value: Any, source: Source) -> dict[str, Any]:
        if value is not None and value != source.number(length):
            raise CannotCarry(
                f"{length}={source.number(length)} is a different limit, but one limit applies to both here"
            )
        return {}

    return convert


def _experts(value: Any, source: Source) -> int:
    if source.count(f"{ROLLOUT}.tensor_model_parallel_size") % int(value):
        raise CannotCarry(
            "an engine has TP ranks here, but TP * DP in verl; set rollout.engine.tensor_parallel and "
            "rollout.engine.expert_parallel by hand"
        )
    return value


def _replay(value: Any, source: Source) -> Any:
    modes = {str(source[key]) for key in REPLAY_MODES} - {"None", "disabled"}
    if value in (None, "disabled") and modes:
        return {}
    return choice({"None": "off", "disabled": "off", "R2": "old_policy", "R3": "engine"})(value, source)


ENGINE = (
    *trains(
        same(f"{MODEL}.path", "model.path"),
        same(f"{ROLLOUT}.temperature", "rollout.temperature", default=1.0),
        becomes(
            f"{ROLLOUT}.top_p", "rollout.top_p", must_be_off(1), "only 1: see rollout.top_k", default=1.0
        ),
        becomes(
            f"{ROLLOUT}.top_k",
            "rollout.top_k",
            top_k_off,
            "only -1 (off); 0 and numbers above any vocabulary mean the same",
            default=-1,
        ),
        fixed(f"{ROLLOUT}.do_sample", (True,), "training samples are never greedy here"),
        fixed(f"{ROLLOUT}.ignore_eos", (False, None), "a response ends at the model's end token here"),
        fixed(
            f"{ROLLOUT}.repetition_penalty",
            (1, None),
            "this would change the distribution that is sampled from",
        ),
        fixed(f"{ROLLOUT}.over_sample_rate", (0, None), "every sample of a step is waited for here"),
        becomes(
            f"{ROLLOUT}.quantization",
            "rollout.engine.quantization",
            choice({"None": "none", "fp8": "fp8"}, "the engine's weights are those that are trained, or fp8"),
            "null: none; fp8: in blocks of 128 x 128, in both",
        ),
        fixed(f"{ROLLOUT}.quantization_config_file", (None,), "see rollout.engine.quantization"),
        becomes(
            f"{ROLLOUT}.prompt_length",
            "data.max_prompt_length",
            _must_equal("data.max_prompt_length"),
            "only data.max_prompt_length",
        ),
        becomes(
            f"{ROLLOUT}.response_length",
            "rollout.max_response_length",
            _must_equal("data.max_response_length"),
            "only data.max_response_length",
        ),
        becomes(
            f"{ROLLOUT}.multi_turn.enable",
            "rollout.environment",
            has_turns,
            "with tools: see tool_config_path and function_tool_path; else write an environment or an agent",
        ),
        becomes(
            f"{ROLLOUT}.multi_turn.tool_config_path",
            ("rollout.tools", "rollout.mcp", "rollout.environment"),
            tools,
            "only MCP servers, if the file is here; reward.function then scores the last turn",
        ),
        becomes(
            f"{ROLLOUT}.multi_turn.function_tool_path",
            ("rollout.tools", "rollout.environment"),
            functions,
            "name each function, as module:function",
        ),
        becomes(
            f"{ROLLOUT}.multi_turn.interaction_config_path",
            "rollout.environment",
            other_turns,
            "only null; else write an environment",
        ),
        becomes(
            f"{ROLLOUT}.agent.default_agent_loop",
            "rollout.environment",
            _agent_loop,
            "single_turn_agent; tool_agent with tools; else write an environment or an agent",
        ),
        becomes(
            f"{ROLLOUT}.agent.agent_loop_config_path",
            "rollout.environment",
            other_turns,
            "only null; else write an environment",
        ),
        *(
            becomes(
                key,
                "moe.routing_replay",
                _replay,
                "disabled: off, R2: old_policy, R3: engine; set one of the three",
            )
            for key in REPLAY_MODES
        ),
    ),
    *(
        dropped(
            key.replace(".mode", ".*"),
            "routing is replayed within a step, never from a file: moe.routing_replay",
        )
        for key in REPLAY_MODES
    ),
    dropped(
        f"{ROLLOUT}.enable_rollout_routing_replay",
        "follows from moe.routing_replay=engine (router_replay.mode=R3)",
    ),
    becomes(
        f"{ROLLOUT}.multi_turn.max_assistant_turns",
        "rollout.max_turns",
        _max_turns,
        "read only with multi_turn.enable",
    ),
    dropped(
        f"{ROLLOUT}.multi_turn.*",
        "see rollout.environment and rollout.max_turns",
    ),
    dropped(f"{ROLLOUT}.calculate_log_probs", "the engine's log-probs are always recorded here"),
    same(f"{ROLLOUT}.enable_prefix_caching", "rollout.engine.prefix_cache"),
    same(f"{ROLLOUT}.tensor_model_parallel_size", "rollout.engine.tensor_parallel", default=2),
    same(f"{ROLLOUT}.gpu_memory_utilization", "rollout.engine.mem_fraction", default=0.5),
    same(f"{ROLLOUT}.max_num_seqs", "rollout.engine.max_running_requests", default=1024),
    same(f"{ROLLOUT}.dtype", "rollout.engine.dtype", default="bfloat16"),
    becomes(
        f"{ROLLOUT}.load_format",
        "rollout.engine.load_format",
        lambda value, source: "dummy" if str(value).startswith("dummy") else "auto",
        "dummy, dummy_megatron, …: dummy; all others: auto",
    ),
    fixed(
        f"{ROLLOUT}.name",
        ("sglang",),
        "the engine is always SGLang here",
        note="whatever the value, the engine is SGLang here",
    ),
    becomes(
        f"{ROLLOUT}.expert_parallel_size",
        "rollout.engine.expert_parallel",
        _experts,
        "only a divisor of the engine's TP; an engine of verl has TP * DP ranks",
    ),
    fixed(
        f"{ROLLOUT}.data_parallel_size",
        (1, None),
        "an engine has TP * DP ranks in verl; set rollout.engine.tensor_parallel to this product, and "
        "rollout.engine.num_engines",
        (
            "rollout.engine.tensor_parallel",
            "rollout.engine.data_parallel_attention",
            "rollout.engine.num_engines",
        ),
    ),
    fixed(f"{ROLLOUT}.pipeline_model_parallel_size", (1, None), "an engine has no pipeline stages here"),
    fixed(
        f"{ROLLOUT}.nnodes",
        (0, None),
        "the engines have their own nodes; set cluster.placement=separate and rollout.engine.num_engines",
        ("cluster.placement", "rollout.engine.num_engines"),
    ),
    dropped(
        f"{ROLLOUT}.n_gpus_per_node",
        "belongs to rollout.nnodes; see cluster.placement and rollout.engine.num_engines",
    ),
    becomes(
        f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes",
        "weight_sync.bucket_bytes",
        lambda value, source: int(value) << 20,
        unit="MiB -> bytes",
    ),
    dropped(f"{ROLLOUT}.checkpoint_engine.*", "how weights reach the engines: see weight_sync.transport"),
    *(
        becomes(
            f"{ROLLOUT}.engine_kwargs.{name}.kv_cache_dtype",
            "rollout.engine.kv_cache_dtype",
            choice({kind: kind for kind in ("auto", "fp8_e4m3", "fp8_e5m2")} | {"fp8": "fp8_e4m3"}),
            "fp8: fp8_e4m3",
        )
        for name in ("sglang", "vllm")
    ),
    same(f"{ROLLOUT}.engine_kwargs.sglang.max_running_requests", "rollout.engine.max_running_requests"),
    becomes(
        f"{ROLLOUT}.engine_kwargs.sglang.disable_radix_cache",
        "rollout.engine.prefix_cache",
        lambda value, source: not truth(value),
        "true: false",
    ),
    dropped(
        f"{ROLLOUT}.engine_kwargs.*", "an option of the engine that has no counterpart in rollout.engine"
    ),
    dropped(f"{ROLLOUT}.agent.num_workers", "see reward.workers, which counts processes on each node"),
    dropped(f"{ROLLOUT}.trace.*", "see rollout.record, monitor.samples_every and eval.save_samples"),
    dropped(f"{ROLLOUT}.prometheus.*", "see monitor.listeners=[prometheus], which has the run's scalars"),
    dropped(f"{ROLLOUT}.seed", "one seed for all: run.seed"),
    same(f"{ROLLOUT}.val_kwargs.n", "eval.n", default=1),
    fixed(
        f"{ROLLOUT}.val_kwargs.top_k", (-1, 0, None), "an evaluation has no top-k here", note="only -1 and 0"
    ),
    same(f"{ROLLOUT}.val_kwargs.top_p", "eval.top_p", default=1.0),
    absorbed(f"{ROLLOUT}.val_kwargs.temperature", "read with do_sample", 0, "eval.temperature"),
    becomes(
        f"{ROLLOUT}.val_kwargs.do_sample",
        ("eval.temperature", "eval.n", "eval.greedy"),
        _validation,
        "false: greedy, one sample",
        default=False,
    ),
    dropped(f"{ROLLOUT}.*", "no counterpart among the options of the engine"),
    dropped("actor_rollout_ref.hybrid_engine", "always true in verl's GRPO; see cluster.placement"),
)
