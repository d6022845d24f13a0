"""Recognition of files of systems that cannot be imported, so that a message can name the system."""

import re
from dataclasses import dataclass

# Text that only files of the systems that can be imported contain.
_IMPORTED = re.compile(
    r"actor_rollout_ref\.|^actor_rollout_ref:|\bverl\.(trainer|recipe|experimental)\b|\brlinf\b|^runner:",
    re.M,
)
# Number of marks needed to name a system. A single mark may occur in another system's file by chance.
_ENOUGH = 2


@dataclass(frozen=True)
class Other:
    """A training system whose launch files are recognised, only to say that they cannot be imported.

    name: the system's usual name.
    marks: regular expressions. Each matches a text that is typical of the system's files.
    """

    name: str
    marks: tuple[str, ...]

    def found_in(self, text: str) -> list[str]:
        """Return the texts in a file that are typical of this system, the first match of each mark."""
        matches = (re.search(mark, text, re.M) for mark in self.marks)
        return [match[0].strip() for match in matches if match]


def _flags(*names: str) -> tuple[str, ...]:
    """Return for each name a regular expression that matches the command-line flag --NAME."""
    return tuple(rf"--(?:{name})(?=[\s=]|$)" for name in names)


def _either(*names: str) -> tuple[str, ...]:
    """Return for each name a regular expression that matches the flag --NAME or the YAML key NAME."""
    return tuple(rf"(?:--|^\s*)(?:{name})(?=[\s:=]|$)" for name in names)


OTHERS = (
    Other(
        "slime",
        (
            r"^[^#\n]*\btrain(_async)?\.py\b",
            *_flags(
                "rollout-batch-size",
                "n-samples-per-prompt",
                "num-rollout",
                "hf-checkpoint",
                "ref-load",
                "rm-type",
            ),
            *_flags(
                "advantage-estimator", "rollout-max-response-len", "actor-num-gpus-per-node", "sglang-[a-z-]+"
            ),
            *_flags("custom-rm-path", "prompt-data", "rollout-function-path"),
        ),
    ),
    Other(
        "OpenRLHF",
        (
            r"\bopenrlhf[./]cli\b",
            *_flags(
                r"vllm[._]num_engines",
                r"actor[._]num_gpus_per_node",
                r"ref[._]num_gpus_per_node",
                r"ds\.zero_stage|zero_stage",
            ),
            *_flags(
                r"rollout[._]batch_size",
                r"rollout\.n_samples_per_prompt|n_samples_per_prompt",
                r"ckpt\.output_dir|ckpt_path",
            ),
            *_flags(
                r"algo\.[\w.]+|init_kl_coef",
                r"data\.prompt_dataset|prompt_data",
                r"actor\.model_name_or_path|pretrain",
            ),
        ),
    ),
    Other(
        "TRL",
        (
            r"\btrl (grpo|rloo|sft|dpo|kto|reward|vllm-serve)\b|\btrl/(scripts|examples|experimental)/",
            *_either("model_name_or_path|per_device_train_batch_size|gradient_accumulation_steps"),
            *_either(
                "num_generations",
                "max_completion_length",
                "use_vllm|vllm_mode",
                "reward_funcs",
                "dataset_name",
            ),
            *_either("num_iterations", "scale_rewards"),
        ),
    ),
    Other(
        "prime-rl",
        (
            *(
                rf"^\[\[?{table}[\].]"
                for table in ("orchestrator", "trainer", "inference", "deployment", "renderer", "ckpt")
            ),
            *(
                rf"^\[{table}\]"
                for table in (r"model\.(ac|lora|vlm)", "optim", "wandb", "weight_broadcast", "data")
            ),
            r"^\[\[(env|eval\.env)\]\]",
            r"\buv run (rl|trainer|orchestrator|inference|sft) @",
            r"^(max_steps|seq_len|async_level|max_async_level|rollouts_per_example|group_size) *= *\d",
        ),
    ),
    Other(
        "NeMo-RL",
        (
            r"^(grpo|dpo|distillation|sft|rm):",
            r"^policy:",
            r"^(loss_fn|checkpointing):",
            r"\bnum_prompts_per_step\b",
            r"\bnum_generations_per_prompt\b",
            r"^[^#\n]*\brun_(grpo|dpo|sft|distillation)\w*\.py\b",
            r"\b(grpo|dpo|distillation)\.[a-z_]+=",
            r"\b(dtensor|megatron)_cfg\b",
            r"\b(policy\.generation\.|logger\.wandb_enabled|checkpointing\.[a-z_]+=)",
            r"^\s*(vllm_cfg|dynamic_batching|sequence_packing):",
            r"^defaults: .*(grpo|dpo|distillation|sft)[_-][\w.-]+\.yaml",
            r"^data_plane:",
            r"^env:",
        ),
    ),
    Other(
        "AReaL",
        (
            r"^gconfig:",
            r"^trial_name:",
            r"^(train_dataset|valid_dataset):",
            r"^\s*name_resolve:",
            r"^\s*max_head_offpolicyness:",
            r"^allocation_mode:|^\s*backend: \"?(sglang|vllm|fsdp|megatron|archon):d\d",
            r"\bareal\.(launcher|infra|experimental|utils)\b|\bareal/launcher\b",
            r"^\s*(mb_spec|ppo_n_minibatches):",
            r"^(saver|recover|stats_logger):",
            r"\b(trial_name|allocation_mode|scheduler\.type)=",
            r"^[^#\n]*\bpython3? (-m )?\S*examples[./]\S+[ \\\n]+--config \S+\.yaml",
        ),
    ),
)


def refusal(text: str) -> str | None:
    """Return an error message if a file is recognised as one of a system that cannot be imported; else None.

    A file is recognised by at least two texts that are typical of the same system.

    text: content of a launch script or configuration file.
    """
    if _IMPORTED.search(text):
        return None
    found = {other.name: other.found_in(text) for other in OTHERS}
    name = max(found, key=lambda one: len(found[one]))
    if len(found[name]) < _ENOUGH:
        return None
    return (
        f"this is a file of {name} ({', '.join(found[name][:3])}), but only launch files of verl and RLinf "
        "can be imported; start from a configuration in docs/recipes.md, and see docs/config.md for all "
        "keys"
    )
