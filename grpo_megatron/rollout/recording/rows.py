"""Rows of a recording: everything about a group except the arrays and texts of its samples, as JSON.

float32 values survive exactly, because they are written as float64, whose shortest decimal form reads back
the same.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.batch.sample import Group, Sample, WeightSpan

_ELSEWHERE = ("handle", "num_prompt", "num_response", "num_trained", "texts", "conversation")


def group_row(group: Group, others: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Convert a group to a row of a recording: a dict of values that JSON can represent.

    The row has an entry for each field of Group except `engine`. Each sample is a dict, too.

    others: for each sample, further entries of its dict, which say where its arrays and texts are.
    """
    samples = []
    for sample, own in zip(group.samples, others, strict=True):
        row = {name: value for name, value in _values(sample).items() if name not in _ELSEWHERE}
        row["weight_spans"] = [_values(span) for span in sample.weight_spans]
        samples.append(row | own)
    prompt = {**_values(group.prompt), "ids": group.prompt.ids.tolist()}
    return {"group_id": group.group_id, "prompt": prompt, "samples": samples, "failed": group.failed}


def _values(of: Prompt | Sample | WeightSpan) -> dict[str, Any]:
    return {spec.name: getattr(of, spec.name) for spec in fields(of)}


def group_of(row: dict[str, Any], sample_of: Callable[[Prompt, dict[str, Any]], Sample]) -> Group:
    """Convert a row of a recording, as `group_row` made it, back to a group.

    sample_of: function that makes a sample. Its arguments are the group's prompt and the sample's dict in the
        row, in which `weight_spans` is already a tuple of WeightSpans.

    Raises KeyError, TypeError or ValueError if the row is damaged.
    """
    prompt = Prompt(**{**row["prompt"], "ids": np.array(row["prompt"]["ids"], dtype=np.int32)})
    samples = []
    for own in row["samples"]:
        spans = tuple(WeightSpan(**span) for span in own["weight_spans"])
        samples.append(sample_of(prompt, {**own, "weight_spans": spans}))
    return Group(row["group_id"], prompt, tuple(samples), row.get("failed", 0))
