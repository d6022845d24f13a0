"""Mapping of verl's algorithm.rollout_correction to keys of grpo_megatron.

The keys correct for the difference between the log-probs of engine and trainer: rollout_is by weights,
rollout_rs by masks.

verl and grpo_megatron both work with the ratio of the trainer's probability to the engine's. Only verl's
criteria token_k1, seq_sum_k1 and seq_mean_k1 use the inverse of this ratio, so their bounds are inverted
here. For example, "0.5_5.0" keeps ratios from 1/5 to 1/0.5.
"""

from typing import Any

from grpo_megatron.importers.converters import absorbed, fixed, truth
from grpo_megatron.importers.mapping import CannotCarry, Source, becomes, dropped

CORRECTION = "algorithm.rollout_correction"
# Criteria with bounds of our ratio (versions of 2025).
DIRECT = {"token": "token_ratio", "sequence": "seq_ratio", "geometric": "seq_geometric_ratio"}
# Criteria with bounds of the inverse of our ratio.
INVERSE = {"token_k1": "token_ratio", "seq_sum_k1": "seq_ratio", "seq_mean_k1": "seq_geometric_ratio"}
# Criteria with an upper bound of a KL estimate.
KL = tuple(
    f"{level}_{measure}" for level in ("token", "seq_sum", "seq_mean", "seq_max") for measure in ("k2", "k3")
)
_BOUNDS = ("mismatch.ratio_low", "mismatch.ratio_high")


def bypasses(source: Source) -> bool:
    """Return True if the engine's log-probs are those of the old policy (bypass_mode)."""
    return truth(source[f"{CORRECTION}.bypass_mode"])


def _number(key: str, text: Any) -> float | int:
    try:
        value = float(text)
    except (TypeError, ValueError):
        raise CannotCarry(f"{key}={text!r} is not a number") from None
    if not value > 0:
        raise CannotCarry(f"{key} must be greater than 0, also in verl, but is {text}")
    return int(value) if value.is_integer() else value


def _thresholds(key: str, value: Any) -> tuple[float | None, float]:
    """Parse a threshold of verl's rollout correction. Return (lower bound or None, upper bound).

    key: verl's key of the threshold, for messages.
    value: a positive number, which is the upper bound, or a text such as "0.5_5.0" with both bounds.

    Raises CannotCarry for anything else.
    """
    if value is None:
        raise CannotCarry(f"verl also requires {key}; set it")
    lower, separator, upper = str(value).rpartition("_")
    return (_number(key, lower) if separator else None), _number(key, upper)


def _rollout_is(value: Any, source: Source) -> dict[str, Any]:
    if value is None:
        return {}
    if value not in ("token", "sequence"):
        raise CannotCarry(
            "this weight does not exist here; verl's token and sequence are tis and seq_tis here"
        )
    if bypasses(source) and source[f"{CORRECTION}.loss_type"] != "reinforce":
        raise CannotCarry(
            "verl does not apply it in bypass_mode with loss_type=ppo_clip, whose ratio is already "
            "relative to the engine"
        )
    lower, upper = _thresholds(
        f"{CORRECTION}.rollout_is_threshold", source[f"{CORRECTION}.rollout_is_threshold"]
    )
    if lower is None:
        return {"mismatch.correction": "tis" if value == "token" else "seq_tis", "mismatch.ratio_high": upper}
    if source[f"{CORRECTION}.rollout_rs"] is not None and not bypasses(source):
        raise CannotCarry(
            "verl's means include tokens whose weight lower_upper sets to 0, but not tokens that rollout_rs "
            "masks; here mismatch.renormalize applies to both"
        )
    kind = "icepop" if value == "token" else "mis"
    return {"mismatch.correction": kind, **dict(zip(_BOUNDS, (lower, upper), strict=True))}


def _rollout_rs(value: Any, source: Source) -> dict[str, Any]:
    if value is None:
        return {}
    criteria = list(dict.fromkeys(part.strip() for part in str(value).split(",")))
    if len(criteria) > 1:
        raise CannotCarry("only one criterion at a time is supported; set mismatch.rejection")
    return {**_rejection(criteria[0], source), **_effects_of_a_mask(source)}


def _rejection(name: str, source: Source) -> dict[str, Any]:
    key = f"{CORRECTION}.rollout_rs_threshold"
    threshold = source[key]
    if name in DIRECT:
        # verl versions that have these names use the threshold of rollout_is if this one is not set.
        lower, upper = _thresholds(key, threshold or source[f"{CORRECTION}.rollout_is_threshold"])
        set_lower = source[f"{CORRECTION}.rollout_rs_threshold_lower"]
        lower = lower or (_number(f"{key}_lower", set_lower) if set_lower is not None else 1 / upper)
        return _kept(DIRECT[name], lower, upper)
    lower, upper = _thresholds(key, threshold)
    if name in INVERSE:
        return _kept(INVERSE[name], 1 / upper, 1 / (lower or 1 / upper))
    if name not in KL:
        raise CannotCarry(
            f"this criterion does not exist here; choose one of {', '.join((*DIRECT, *INVERSE, *KL))}"
        )
    if lower is not None:
        raise CannotCarry(f"{name} has only an upper bound, also in verl")
    return {"mismatch.rejection": name, "mismatch.rejection_high": upper}


def _kept(kind: str, low: float, high: float) -> dict[str, Any]:
    return {"mismatch.rejection": kind, "mismatch.rejection_low": low, "mismatch.rejection_high": high}


def _effects_of_a_mask(source: Source) -> dict[str, Any]:
    """Return {key: value} that gives tokens masked by verl's rollout_rs the same effect as in verl.

    verl removes the masked tokens from the batch, so KL, entropy and means do not count them either. With
    rollout_correction.bypass_mode, verl does not remove the tokens, and the result is empty.
    """
    if bypasses(source):
        return {}
    return {"mismatch.renormalize": True, "algorithm.mask_applies_to": "all"}


ROLLOUT_CORRECTION = (
    becomes(
        f"{CORRECTION}.rollout_is",
        ("mismatch.correction", *_BOUNDS),
        _rollout_is,
        "importance weights; token: tis; sequence: seq_tis; with a threshold lower_upper, token: icepop, "
        "sequence: mis",
        default=None,
    ),
    becomes(
        f"{CORRECTION}.rollout_rs",
        (
            "mismatch.rejection",
            "mismatch.rejection_low",
            "mismatch.rejection_high",
            "mismatch.renormalize",
            "algorithm.mask_applies_to",
        ),
        _rollout_rs,
        "masks; token, token_k1: token_ratio; sequence, seq_sum_k1: seq_ratio; geometric, seq_mean_k1: "
        "seq_geometric_ratio; bounds of *_k1 are inverted; *_k2, *_k3: the same names; without bypass_mode,"
        " masked tokens do not count in KL, entropy and means either",
        default=None,
    ),
    absorbed(f"{CORRECTION}.rollout_is_threshold", "read with rollout_is", default=2.0),
    absorbed(f"{CORRECTION}.rollout_rs_threshold", "read with rollout_rs", default=None),
    absorbed(
        f"{CORRECTION}.rollout_rs_threshold_lower",
        "read with rollout_rs; verl's default is 1 / upper",
        default=None,
    ),
    fixed(
        f"{CORRECTION}.rollout_is_batch_normalize",
        (False,),
        "weights are not divided by their mean over the batch here",
    ),
    becomes(
        f"{CORRECTION}.bypass_mode",
        "train.old_logprobs",
        lambda value, source: "rollout" if truth(value) else "recompute",
        "true: the engine's log-probs are the old policy's",
        default=False,
    ),
    absorbed(
        f"{CORRECTION}.loss_type",
        "decides the policy loss in bypass_mode; read with policy_loss.loss_mode",
        default="ppo_clip",
    ),
    dropped(f"{CORRECTION}.*", "no such part of the correction here"),
)
