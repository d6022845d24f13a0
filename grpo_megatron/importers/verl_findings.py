"""Differences between what a verl run and its import train, as far as no single key causes them."""

import re

from grpo_megatron.importers.mapping import Finding, Source
from grpo_megatron.importers.settings import Settings

# Configuration files that verl ships. The defaults of the mapping are their values.
SHIPPED = ("ppo_trainer", "ppo_megatron_trainer")
_VISION = re.compile(
    r"(?i)(?<![a-z])(vl|vlm|omni|vision|pixtral|llava|internvl|paligemma|mllama)(?![a-z])|minicpm-?[ov](?![a-z])|glm-?4\.[15]v"
)


def refusal(source: Source, settings: Settings) -> str | None:
    name = re.split(r"[./]", (settings.program or "").removesuffix(".py"))[-1]
    if re.search(r"sft|generation|main_eval", name):
        return (
            f"{settings.program} is not a reinforcement learning program; only runs of verl's RL trainer "
            "(main_ppo and its variants) can be imported"
        )
    return None


def findings(source: Source, settings: Settings) -> list[Finding]:
    """Return the differences between what a verl run trains and what the imported run trains.

    The reward always counts as a difference. Other possible differences are a model for images, a program
    other than main_ppo, a base configuration that was not read, and settings that reach no command. A value
    that cannot be carried over is left out, because the mapping of its key reports it.
    """
    found = [
        Finding(
            "reward: verl scores a record by the rule of its data_source, or by a function of your own, "
            "but here one reward.function applies to all records; set reward.function=math, "
            "reward.function=exact_match or reward.function=module:function",
            ("reward.function",),
        )
    ]
    model = settings.values.get("actor_rollout_ref.model.path")
    if isinstance(model, str) and _VISION.search(model):
        found.append(
            Finding(
                f"actor_rollout_ref.model.path={model}: judging by its name, this is a model for images, "
                "but only text is trained here"
            )
        )
    if settings.program and not settings.program.endswith(("main_ppo", "main_ppo.py")):
        found.append(
            Finding(
                f"{settings.program}: a different program from verl's main_ppo; what else it does is not "
                "known here"
            )
        )
    name = settings.base.get("name", "").removesuffix(".yaml")
    if (
        (name and name not in SHIPPED)
        or settings.base.get("path", "config").removeprefix("./") != "config"
        or "dir" in settings.base
    ):
        named = ", ".join(f"--config-{kind}={value}" for kind, value in settings.base.items())
        found.append(
            Finding(
                f"{named}: this base configuration was not read; put its settings into the command, or "
                "import that file by itself"
            )
        )
    return found + [Finding(line) for line in settings.lost]
