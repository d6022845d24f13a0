"""Learning-rate schedules, rules for the optimizer's settings, and dropped steps that stop a run."""

import json
import math
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from grpo_megatron.config.command import Command
from grpo_megatron.config.derived import lr_decay_steps
from grpo_megatron.config.schema import LrSchedule, OptimizerConfig, WsdDecayStyle
from grpo_megatron.errors import UserError
from grpo_megatron.files import json_text
from grpo_megatron.megatron.optimizer import continue_schedule, lr_scheduler
from grpo_megatron.megatron.results import StepOutcome
from grpo_megatron.preflight.check import load_config
from grpo_megatron.trainer.optimizer_steps import OptimizerSteps

# lr 1, down to 0.2 at step 12, 4 steps of warm-up; wsd decays in steps 9 to 12.
CONFIG = OptimizerConfig(
    lr=1.0, lr_min=0.2, lr_warmup_steps=4, lr_decay_steps=12, wsd_decay_steps=4, weight_decay=0.1
)
WARM_UP = [0.25, 0.5, 0.75, 1.0]
WSD = {
    WsdDecayStyle.linear: [0.8, 0.6, 0.4, 0.2],
    WsdDecayStyle.cosine: [0.8828427, 0.6, 0.3171573, 0.2],
    WsdDecayStyle.exponential: [0.7454343, 0.5313708, 0.3513657, 0.2],
    WsdDecayStyle.minus_sqrt: [0.6, 0.4343146, 0.3071797, 0.2],
}
SCHEDULES = {
    "constant": (replace(CONFIG, lr_schedule=LrSchedule.constant), [*WARM_UP, *[1.0] * 10]),
    "linear": (
        replace(CONFIG, lr_schedule=LrSchedule.linear),
        [*WARM_UP, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.2, 0.2],
    ),
    "cosine": (
        replace(CONFIG, lr_schedule=LrSchedule.cosine),
        [*WARM_UP, *[0.6 + 0.4 * math.cos(math.pi * i / 8) for i in range(1, 9)], 0.2, 0.2],
    ),
    **{
        f"wsd {style.value}": (
            replace(CONFIG, lr_schedule=LrSchedule.wsd, wsd_decay_style=style),
            [*WARM_UP, *[1.0] * 4, *rates, 0.2, 0.2],
        )
        for style, rates in WSD.items()
    },
}


def adam(config: OptimizerConfig) -> torch.optim.Optimizer:
    """Return two groups as Megatron makes them: with weight decay and without."""
    rates = {"max_lr": config.lr, "min_lr": config.lr_min}
    groups = [
        {"params": [torch.nn.Parameter(torch.ones(2))], "wd_mult": wd_mult, **rates} for wd_mult in (1.0, 0.0)
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps)


def scheduled(config: OptimizerConfig):
    return lr_scheduler(adam(config), config, config.lr_decay_steps)


def next_rates(scheduler, count: int) -> list[float]:
    """Do the next `count` steps and return their rates."""
    rates = []
    for _ in range(count):
        first, second = scheduler.optimizer.param_groups
        assert first["lr"] == second["lr"]
        rates.append(first["lr"])
        scheduler.step(1)
    return rates


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_rate_of_every_step(name):
    config, rates = SCHEDULES[name]
    assert next_rates(scheduled(config), len(rates)) == pytest.approx(rates, abs=1e-6)


def test_without_warm_up_the_decay_begins_at_once():
    config = replace(CONFIG, lr_schedule=LrSchedule.linear, lr_warmup_steps=0, lr_decay_steps=4)
    assert next_rates(scheduled(config), 5) == pytest.approx([0.8, 0.6, 0.4, 0.2, 0.2])


@pytest.mark.parametrize("schedule", [LrSchedule.linear, LrSchedule.cosine])
def test_a_schedule_that_is_all_warm_up(schedule):
    config = replace(CONFIG, lr_schedule=schedule, lr_decay_steps=4)
    assert next_rates(scheduled(config), 6) == pytest.approx([*WARM_UP, 0.2, 0.2])


def resumed(config: OptimizerConfig, after: int, old: OptimizerConfig):
    """Return a scheduler of `config` that continues a run of `old` after so many steps, from its saved
    states.
    """
    saved = scheduled(old)
    next_rates(saved, after)
    scheduler = scheduled(config)
    scheduler.optimizer.load_state_dict(saved.optimizer.state_dict())
    continue_schedule(scheduler, config, saved.state_dict())
    return scheduler


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("after", [0, 2, 4, 9, 13])
def test_resuming_continues_the_rates(name, after):
    config, rates = SCHEDULES[name]
    rest = rates[after:]
    assert next_rates(resumed(config, after, config), len(rest)) == pytest.approx(rest, abs=1e-6)


CHANGES = {
    "lr": {"lr": 2.0},
    "lr_min": {"lr_min": 0.05},
    "schedule": {"lr_schedule": LrSchedule.linear},
    "wsd": {"lr_schedule": LrSchedule.wsd, "wsd_decay_style": WsdDecayStyle.minus_sqrt},
    "length": {"lr_decay_steps": 20},
    "warm-up": {"lr_warmup_steps": 8},
    "Adam": {"beta1": 0.5, "beta2": 0.6, "eps": 0.1, "weight_decay": 0.3},
}


@pytest.mark.parametrize("change", CHANGES)
def test_resuming_takes_the_present_settings(change):
    old = SCHEDULES["cosine"][0]
    config = replace(old, **CHANGES[change])
    undisturbed = next_rates(scheduled(config), 20)
    scheduler = resumed(config, 6, old)
    decayed, undecayed = scheduler.optimizer.param_groups
    assert decayed["betas"] == (config.beta1, config.beta2)
    assert decayed["eps"] == config.eps
    assert (decayed["weight_decay"], undecayed["weight_decay"]) == (config.weight_decay, 0.0)
    assert next_rates(scheduler, 14) == pytest.approx(undisturbed[6:])


# --- settings

NEEDED = ["model.path=m", "data.train=d.jsonl"]
COSINE = "optimizer.lr_schedule=cosine"
BROKEN = {
    "lr_min over lr": (
        ["optimizer.lr=1e-6", "optimizer.lr_min=1e-5"],
        "optimizer.lr_min must be at most optimizer.lr (optimizer.lr_min=1.0e-05, optimizer.lr=1.0e-06)",
    ),
    "negative lr_min": (
        ["optimizer.lr_min=-1"],
        "optimizer.lr_min must be at least 0, but is -1",
    ),
    "warm-up": (
        [COSINE, "optimizer.lr_warmup_steps=9", "optimizer.lr_decay_steps=8"],
        "optimizer.lr_warmup_steps=9, optimizer.wsd_decay_steps=null; the schedule has 8 steps",
    ),
    "warm-up over the run": (
        [COSINE, "optimizer.lr_warmup_steps=9", "run.total_steps=8"],
        "optimizer.lr_warmup_steps=9, optimizer.wsd_decay_steps=null; the schedule has 8 steps",
    ),
    "no length": (
        ["optimizer.lr_decay_steps=0"],
        "optimizer.lr_decay_steps must be greater than 0, but is 0",
    ),
    "wsd without a decay": (
        ["optimizer.lr_schedule=wsd"],
        "optimizer.lr_schedule=wsd needs optimizer.wsd_decay_steps",
    ),
    "wsd decay of nothing": (
        ["optimizer.wsd_decay_steps=0"],
        "optimizer.wsd_decay_steps must be greater than 0, but is 0",
    ),
    "wsd decay too long": (
        ["optimizer.lr_schedule=wsd", "optimizer.wsd_decay_steps=101"],
        "optimizer.lr_warmup_steps=0, optimizer.wsd_decay_steps=101; the schedule has 100 steps",
    ),
    "wsd decay into the warm-up": (
        ["optimizer.lr_schedule=wsd", "optimizer.wsd_decay_steps=60", "optimizer.lr_warmup_steps=41"],
        "optimizer.lr_warmup_steps=41, optimizer.wsd_decay_steps=60; the schedule has 100 steps",
    ),
    "never a step": (
        ["optimizer.max_grad_norm_to_step=0"],
        "optimizer.max_grad_norm_to_step must be greater than 0, but is 0",
    ),
    "no dropped step": (
        ["optimizer.max_dropped_steps=0"],
        "optimizer.max_dropped_steps must be greater than 0, but is 0",
    ),
    "unknown schedule": (["optimizer.lr_schedule=polynomial"], "lr_schedule"),
    "unknown decay": (["optimizer.wsd_decay_style=polynomial"], "wsd_decay_style"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_each_broken_rule_is_one_sentence(name):
    overrides, sentence = BROKEN[name]
    with pytest.raises(UserError) as caught:
        load_config(None, [*NEEDED, *overrides])
    message = str(caught.value)
    assert sentence in message
    assert "\n" not in message


def test_the_limits_themselves_are_legal():
    at_the_limit = [
        "optimizer.wsd_decay_steps=60",
        "optimizer.lr_warmup_steps=40",
        "optimizer.lr=1e-5",
        "optimizer.lr_min=1e-5",
    ]
    load_config(None, [*NEEDED, "optimizer.lr_schedule=wsd", *at_the_limit])
    load_config(None, [*NEEDED, COSINE, "optimizer.lr_warmup_steps=100"])
    # A constant rate has no end that a long warm-up could pass.
    load_config(None, [*NEEDED, "optimizer.lr_warmup_steps=1000"])


def test_the_schedule_is_as_long_as_the_run():
    run = [
        "run.total_steps=10",
        "data.train_batch_size=32",
        "train.ppo_mini_batch_size=8",
        "train.ppo_epochs=3",
    ]
    config = load_config(None, [*NEEDED, *run])
    assert lr_decay_steps(config, Command.train) == 10 * 4 * 3
    assert lr_decay_steps(config, Command.sft) == 10
    given = load_config(None, [*NEEDED, *run, "optimizer.lr_decay_steps=7"])
    assert lr_decay_steps(given, Command.train) == lr_decay_steps(given, Command.sft) == 7


# --- dropped steps


def watched(**options) -> OptimizerSteps:
    """Return a watch on the steps of a model whose weights are finite."""
    weights = SimpleNamespace(must_be_finite=lambda: None)
    return OptimizerSteps(OptimizerConfig(**options), weights)


def dropped(grad_norm: float) -> StepOutcome:
    return StepOutcome(grad_norm, lr=1e-6, dropped=True)


def test_dropped_steps_in_a_row_stop_the_run():
    watch = watched(max_dropped_steps=3)
    for step in (1, 2):
        watch.note(dropped(math.nan), math.nan, step)
    watch.note(StepOutcome(1.0, 1e-6, dropped=False), 0.5, 3)  # a good one in between
    for step in (4, 5):
        watch.note(dropped(math.nan), math.nan, step)
    with pytest.raises(
        UserError, match=r"3 optimizer steps in a row were dropped, the last one in step 6 "
    ) as caught:
        watch.note(dropped(math.inf), 0.25, 6)
    message = str(caught.value)
    assert "gradient norms nan, nan, inf, losses nan, nan, 0.25" in message
    assert "metrics.jsonl" in message
    assert "max_grad_norm_to_step" not in message


def test_a_value_that_is_not_finite_has_the_weights_checked():
    def broken():
        raise UserError("a weight is NaN")

    weights = SimpleNamespace(must_be_finite=broken, last_step=None)
    watch = OptimizerSteps(OptimizerConfig(), weights)
    watch.note(StepOutcome(1.0, 1e-6, dropped=False), 0.5, 1)
    watch.note(dropped(2.0), 0.5, 2)
    assert weights.last_step == 1
    for norm, loss in ((math.nan, 0.5), (1.0, math.inf)):
        with pytest.raises(UserError, match="a weight is NaN"):
            watch.note(dropped(norm), loss, 3)


def test_norms_over_the_limit_are_explained():
    watch = watched(max_dropped_steps=1, max_grad_norm_to_step=10.0)
    with pytest.raises(UserError, match=re.escape("gradient norms 1234, losses 0.5")) as caught:
        watch.note(dropped(1234.0), 0.5, 1)
    assert "exceeded optimizer.max_grad_norm_to_step=10.0" in str(caught.value)
    assert "NaN" not in str(caught.value)


def test_each_dropped_step_has_its_own_reason():
    """A reason of a single step was said to be that of all."""
    watch = watched(max_dropped_steps=4, max_grad_norm_to_step=10.0)
    watch.note(dropped(1.0), 0.5, 1, ("the KL divergence was 2", "the entropy was 9"))
    watch.note(dropped(1.0), 0.5, 2, ("no token has a weight",))
    watch.note(dropped(1234.0), 0.5, 3)
    with pytest.raises(UserError) as caught:
        watch.note(dropped(1.0), 0.5, 4, ("no token has a weight",))
    message = str(caught.value)
    assert (
        "The gradient was not the reason for 3 of these steps. The reason was: the KL divergence was 2; the "
        "entropy was 9; no token has a weight. A finite norm exceeded optimizer.max_grad_norm_to_step=10.0: "
    ) in message
    watch = watched(max_dropped_steps=1)
    with pytest.raises(UserError, match=r"The gradient was not the reason\. The reason was: x\.$"):
        watch.note(dropped(1.0), 0.5, 1, ("x",))


def test_a_resumed_run_still_knows_its_dropped_steps():
    """A checkpoint has null in place of NaN, which a resumed run could not explain."""
    watch = watched(max_dropped_steps=3)
    watch.note(dropped(math.nan), math.inf, 1)
    watch.note(dropped(1.0), 0.5, 2, ("x",))
    state = json.loads(json_text(watch.state_dict()))
    for resumed in (state, {"in_a_row": [pair[:2] for pair in state["in_a_row"]]}):  # of an earlier version
        watch = watched(max_dropped_steps=3)
        watch.load_state_dict(resumed)
        with pytest.raises(UserError, match=r"gradient norms nan, 1, 1, losses nan, 0\.5, 0\.5"):
            watch.note(dropped(1.0), 0.5, 3)
