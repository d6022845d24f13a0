"""Presets as configuration, and the rules about the algorithm."""

import pytest

from grpo_megatron.algorithm.advantages import advantage_estimator
from grpo_megatron.algorithm.columns import needs_columns
from grpo_megatron.config.load import PRESETS
from grpo_megatron.errors import UserError
from grpo_megatron.preflight.check import load_config

NEEDED = ["model.path=m", "data.train=d.jsonl"]
NAMES = sorted(file.stem for file in PRESETS.glob("*.yaml"))


def error_of(*overrides) -> str:
    with pytest.raises(UserError) as caught:
        load_config(None, [*NEEDED, *overrides])
    return str(caught.value)


@pytest.mark.parametrize("name", NAMES)
def test_every_preset_is_legal_and_cites_its_paper(name):
    config = load_config(None, [*NEEDED, f"algorithm.preset={name}"])
    assert config.algorithm.preset == name
    text = (PRESETS / f"{name}.yaml").read_text(encoding="utf-8")
    assert "arXiv:" in text
    assert len(text.splitlines()) <= 12


def test_a_preset_is_below_ones_own_keys(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("algorithm: {clip_ratio_low: 0.1, preset: gspo}\nmismatch: {action: off}\n")
    config = load_config(str(path), NEEDED)
    assert (config.algorithm.ratio_level, config.algorithm.clip_ratio_low) == ("sequence", 0.1)
    assert config.algorithm.clip_ratio_high == 4e-4
    assert config.mismatch.action == "off"
    # Only the last one named applies.
    config = load_config(str(path), [*NEEDED, "algorithm.clip_ratio_low=0.3", "algorithm.preset=rloo"])
    assert (config.algorithm.adv_estimator, config.algorithm.ratio_level) == ("rloo", "token")
    assert config.algorithm.clip_ratio_low == 0.3
    assert config.algorithm.kl_ctrl.kl_coef == 0.03
    config = load_config(str(path), [*NEEDED, "algorithm.preset=null"])
    assert config.algorithm.ratio_level == "token"


def test_an_unknown_preset_names_the_known_ones():
    assert "choose one of cispo, dapo, dr_grpo" in error_of("algorithm.preset=ppo")


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["algorithm.adv_clip=0"], "algorithm.adv_clip must be greater than 0"),
        (["algorithm.early_stop_imp_ratio=-1"], "early_stop_imp_ratio must be greater"),
        (["algorithm.clip_ratio_low=-0.1"], "clip_ratio_low must be at least 0"),
        (["algorithm.clip_ratio_c=1.0"], "clip_ratio_c must be greater than 1"),
        (
            ["algorithm.clip_ratio_c=3", "algorithm.surrogate=cispo"],
            "dual clip is a part of the surrogate clip",
        ),
        (["reward.overlong_buffer.length=600"], "rollout.max_response_length=512"),
        (["reward.overlong_buffer.penalty=-1"], "penalty must be at least 0"),
        (["algorithm.ratio_level=sentence"], "got sentence"),
        (["algorithm.kl_loss_type=k4"], "got k4"),
        (["algorithm.kl_penalty=k3+"], "got k3+"),
        (["algorithm.kl_penalty=full"], "got full"),
        (["algorithm.ratio_level=sequence_sum"], "needs algorithm.loss_agg_mode=group-sum|"),
        (["algorithm.surrogate=reinforce", "algorithm.ratio_level=sequence"], "has no policy ratio"),
        (["algorithm.early_stop_imp_ratio=5", "train.old_logprobs=current"], "the policy ratio is always 1"),
        (["algorithm.entropy_floor=1"], "needs algorithm.entropy_coeff"),
        (["algorithm.kl_loss_unbiased=true"], "needs algorithm.use_kl_loss"),
        (
            ["algorithm.kl_loss_unbiased=true", "algorithm.use_kl_loss=true", "algorithm.kl_loss_type=k2"],
            "algorithm.kl_loss_type=k2",
        ),
        (
            ["algorithm.use_kl_in_reward=true", "train.old_logprobs=current"],
            "must be known before training",
        ),
        (["algorithm.kl_ctrl.type=adaptive"], "coefficient of the KL in the reward"),
        (["ref.reset_every=5"], "a reference model is used only for a KL"),
        (["mismatch.correction=tis", "train.old_logprobs=rollout"], "twice"),
        (["mismatch.ratio_high=3"], "only with mismatch.correction!=none"),
        (
            ["mismatch.correction=icepop", "mismatch.ratio_low=3", "mismatch.ratio_high=2"],
            "must be at most mismatch.ratio_high",
        ),
        (["mismatch.rejection_high=3"], "only with mismatch.rejection!=none"),
        (["mismatch.rejection=seq_mean_k3"], "needs mismatch.rejection_high"),
        (
            ["mismatch.rejection=token_k2", "mismatch.rejection_low=0", "mismatch.rejection_high=1"],
            "a KL has no lower bound",
        ),
        (
            ["mismatch.rejection=token_ratio", "mismatch.rejection_low=3", "mismatch.rejection_high=2"],
            "mismatch.rejection_high",
        ),
        (
            ["mismatch.rejection=token_ratio", "mismatch.rejection_low=-1"],
            "mismatch.rejection_low must be at least 0",
        ),
        (["mismatch.renormalize=true"], "otherwise no token is masked"),
        (["mismatch.renormalize=true", "mismatch.correction=tis"], "otherwise no token is masked"),
        (
            ["mismatch.renormalize=true", "mismatch.correction=icepop", "train.old_logprobs=current"],
            "old_logprobs=recompute",
        ),
        (
            ["mismatch.renormalize=true", "mismatch.rejection=seq_ratio", "train.old_logprobs=rollout"],
            "old_logprobs=recompute",
        ),
        (["mismatch.action=off", "mismatch.threshold=0.5"], "only with mismatch.action!=off"),
        (["mismatch.action=mask", "mismatch.threshold=0"], "mismatch.threshold must be greater than 0"),
        (["rollout.n=1", "algorithm.adv_estimator=rloo"], "a single sample always gets the advantage 0"),
    ],
)
def test_rules(overrides, says):
    assert says in error_of(*overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        ["rollout.n=1", "algorithm.adv_estimator=reinforce_plus_plus"],
        ["mismatch.rejection=seq_geometric_ratio", "train.old_logprobs=rollout"],
        ["mismatch.correction=tis", "algorithm.surrogate=reinforce", "train.old_logprobs=rollout"],
        [
            "mismatch.correction=tis",
            "mismatch.rejection=seq_max_k3",
            "mismatch.rejection_high=0.1",
            "mismatch.renormalize=true",
        ],
        ["mismatch.action=mask", "mismatch.renormalize=true"],
        ["ref.reset_every=5", "algorithm.use_kl_in_reward=true", "checkpoint.every=7"],
        ["ref.reset_every=5", "algorithm.use_kl_loss=true"],
        ["algorithm.ratio_level=sequence_sum", "algorithm.loss_agg_mode=seq-mean-token-mean"],
    ],
)
def test_what_is_legal(overrides):
    load_config(None, [*NEEDED, *overrides])


def test_an_estimators_columns_must_be_computed_before_training(monkeypatch):
    @needs_columns("old_logp", "ref_logp")
    def curious(inputs, options): ...

    monkeypatch.setitem(advantage_estimator._known, "curious", curious)
    said = error_of("algorithm.adv_estimator=curious", "train.old_logprobs=current")
    assert "old_logp is not; set train.old_logprobs=recompute" in said
    assert "ref_logp is not; set algorithm.use_kl_loss=true" in said
    fine = ["algorithm.adv_estimator=curious", "train.old_logprobs=rollout", "algorithm.use_kl_loss=true"]
    load_config(None, [*NEEDED, *fine])
