"""Charts: which scalars TensorBoard's custom layout and the report show together."""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Chart:
    """A chart of a run's metrics over the steps.

    title: heading of the chart, with the unit if it is not obvious
    names: regular expressions. The chart has a line for each scalar whose whole name matches one of them
    """

    title: str
    names: tuple[str, ...]

    def shows(self, name: str) -> bool:
        return any(re.fullmatch(pattern, name) for pattern in self.names)


# {section: charts}. The report leaves out a chart if the run has none of its scalars.
SECTIONS: dict[str, tuple[Chart, ...]] = {
    "Learning": (
        Chart("Reward", ("reward/mean", "reward/std")),
        Chart("Components of the reward, mean", ("reward/component/.*",)),
        Chart("pass@k of training prompts", (r"reward/pass@\d+",)),
        Chart("Held-out prompts", ("eval/.*",)),
        Chart("Response length, tokens", ("response/length_(mean|max)",)),
        Chart("Responses cut off, share", ("response/(truncated|out_of_turns)",)),
        Chart("Turns and sequences of a response", ("response/(turns|sequences)_mean",)),
        Chart("Entropy, nats", ("actor/entropy",)),
        Chart("KL, nats", ("actor/(kl_to_reference|kl_in_reward|ppo_kl)",)),
        Chart("Coefficient of the KL in the reward", ("actor/kl_coef",)),
        Chart("Clip fractions", ("actor/clip_fraction.*",)),
        Chart("Ratio to the old policy, mean", ("actor/ratio",)),
        Chart("Loss", ("actor/(pg_)?loss", "sft/loss_per_token", "reward_model/loss")),
        Chart("Reward model: preferred response scored higher, share", ("reward_model/accuracy",)),
        Chart("Reward model: scores, and margin of the preferred one", ("reward_model/(margin|score_.*)",)),
        Chart("Learning rate", ("actor/lr",)),
    ),
    "Health": (
        Chart("Mismatch of engine and trainer: largest, nats", ("mismatch/max",)),
        Chart("Mismatch of engine and trainer: mean, nats", ("mismatch/(mean|k3)",)),
        Chart("Mismatch of engine and trainer: ratio", ("mismatch/ratio_.*", "mismatch/factor")),
        Chart("Tokens masked for their mismatch, share", ("mismatch/masked",)),
        Chart("Staleness of tokens, and versions in a response", ("staleness/(mean|max|versions)",)),
        Chart("Change of the policy since its tokens were sampled", ("staleness/logprob_.*",)),
        Chart("Change of the policy by the age of tokens", ("staleness/ratio_change_age_.*",)),
        Chart("Groups being sampled, and groups waiting for a step", ("rollout/groups_.*",)),
        Chart("Engines that get requests", ("rollout/engines",)),
        Chart("Gradient norm", ("actor/grad_norm",)),
        Chart(
            "Optimizer steps, taken and dropped",
            ("actor/(dropped_steps|steps_beyond_limit|optimizer_steps)",),
        ),
        Chart("Rewards that failed", ("reward/failed",)),
        Chart("Groups without a signal, share", ("reward/(zero_variance|filtered)_groups",)),
        Chart(
            "Groups scored, and groups aborted because the batch was full",
            ("rollout/.*_groups",),
        ),
        Chart("Losses of the routers", ("moe/.*",)),
        Chart("Weights of engine and trainer after a sync", ("sync/probe.*",)),
    ),
    "Speed": (
        Chart("Tokens per second", ("throughput/tokens_per_second",)),
        Chart("Tokens per second and device", ("throughput/tokens_per_second_per_device",)),
        Chart("Model FLOPs utilisation", ("throughput/mfu.*",)),
        Chart("Seconds of a step", ("time/step",)),
        Chart("Seconds per phase", ("time/(?!step|monitor).*",)),
        Chart("Idle share of the step, per role", ("idle/.*",)),
        Chart("Seconds of a weight sync", ("sync/.*seconds",)),
        Chart("Weight sync, GB", ("sync/.*_gb",)),
        Chart("Seconds in monitoring", ("time/monitor",)),
    ),
    "Memory": (
        Chart("Processes, GiB", ("memory/[^/]*_gib",)),
        Chart("Fullest engine after each transition, GiB", ("memory/.*/engine_gib",)),
        Chart("Fullest rank after each transition, GiB", ("memory/.*/rank_gib",)),
    ),
}
OTHERS = "Others"


def charts_of(names: list[str]) -> dict[str, dict[str, list[str]]]:
    """Sort a run's scalars into charts. Return {section: {title of a chart: names of its scalars}}.

    A scalar that belongs to no chart of SECTIONS gets its own chart in the section OTHERS.

    names: names of all scalars of the run.
    """
    found: dict[str, dict[str, list[str]]] = {}
    left = dict.fromkeys(names)
    for section, charts in SECTIONS.items():
        for chart in charts:
            shown = [name for name in names if chart.shows(name)]
            if shown:
                found.setdefault(section, {})[chart.title] = shown
            for name in shown:
                left.pop(name, None)
    for name in left:
        found.setdefault(OTHERS, {})[name] = [name]
    return found


def tensorboard_layout() -> dict[str, dict[str, list]]:
    """Return the layout of charts for TensorBoard, as SummaryWriter.add_custom_scalars expects it.

    The result is {section: {title of a chart: ["Multiline", regular expressions of its scalars]}}.
    """
    # The `$` is needed, because in TensorBoard an expression need only match the beginning of a name.
    return {
        section: {chart.title: ["Multiline", [f"{pattern}$" for pattern in chart.names]] for chart in charts}
        for section, charts in SECTIONS.items()
    }
