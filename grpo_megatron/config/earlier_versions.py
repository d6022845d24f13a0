"""Configuration keys and values that only earlier versions had.

The loader refuses them, with a message that says what to use instead.
"""

# {earlier name of a key: its name now}
RENAMED_KEYS = {
    "cluster.sync_bucket_bytes": "weight_sync.bucket_bytes",
    "model.reference_path": "ref.path",
}
# {key without a successor: what to do}
REMOVED_KEYS = {
    "ref.ahead": "delete it; the reference's log-probs are computed after generation",
    "weight_sync.pause": "use rollout.on_update: continue for retract, keep for in_place, wait for abort",
}
# {(key, value): what to use instead}. A value may also be an item of a list.
REMOVED_VALUES = {
    ("mismatch.correction", "rejection"): "use mismatch.rejection=seq_geometric_ratio",
    ("rollout.tools", "calculator"): "replace it with examples.calculator:calculator",
    (
        "weight_sync.transport",
        "object_store",
    ): "use weight_sync.transport=auto, which sends each engine rank its own slices and compares their "
    "digests",
}


def removed_value_problem(key: str, value: object) -> str | None:
    """Return an error message if only earlier versions accepted this value of a key, else None.

    The message says what to use instead. If `value` is a list, each of its items is checked, and the message
    is about the first item that is no longer accepted.
    """
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, str) and (key, item) in REMOVED_VALUES:
            return f"{key} can no longer be {item}; {REMOVED_VALUES[key, item]}"
    return None
