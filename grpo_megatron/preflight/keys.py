"""Facts about a configuration key in addition to its help text: legal values, related keys and rules.

`config explain` and docs/config.md show them.
"""

import re

from grpo_megatron.algorithm.advantages import advantage_estimator
from grpo_megatron.algorithm.filters import group_filter
from grpo_megatron.algorithm.surrogates import surrogate
from grpo_megatron.config.keys import choices_of, is_section, known_keys
from grpo_megatron.preflight.rule import Rule
from grpo_megatron.preflight.rules import all_rules
from grpo_megatron.rollout.environments import environment

_REGISTRIES = {
    registry.key: registry for registry in (advantage_estimator, surrogate, group_filter, environment)
}


def rules_about(key: str) -> list[Rule]:
    return [rule for rule in all_rules() if key in rule.keys]


def named_in_help(key: str) -> list[str]:
    """Return the names of the other configuration keys that the help text of `key` mentions.

    A help text mentions a key by its full name, such as rollout.n. A key in the same section as `key` may
    also be mentioned without its section, if the rest of its name has several words, such as clip_ratio_low.
    """
    known, section = known_keys(), key.rpartition(".")[0]
    words = re.findall(r"[a-z]\w*(?:\.\w+)*", known[key].description)
    names = [word if "." in word else f"{section}.{word}" for word in words if "." in word or "_" in word]
    return [name for name in names if name in known and name != key]


def interacting_keys(key: str) -> list[str]:
    """Return the configuration keys that are related to `key`, in the order of the schema.

    Two keys are related if a rule reads both, or if the help text of one mentions the other. `config explain`
    shows the related keys.
    """
    known = known_keys()
    found = {name for rule in rules_about(key) for name in rule.keys} | set(named_in_help(key))
    found |= {other for other in known if key in named_in_help(other)}
    return [name for name in known if name in found - {key} and not is_section(known[name])]


def choices(key: str) -> list[str]:
    """Return the legal values of a configuration key, or an empty list if they cannot be listed.

    For a key that is a list, these are the legal values of its items. For a key that names a registered
    function, such as an advantage estimator, the last value is `module:attribute`.
    """
    if key in _REGISTRIES:
        return [*_REGISTRIES[key].names, "module:attribute"]
    return choices_of(known_keys()[key].annotation)
