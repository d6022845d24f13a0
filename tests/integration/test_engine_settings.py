"""Effect of the engines' arguments in the GPU stack's SGLang, by its own Python code under a faked H100.

Defaults that exist only on CUDA, such as prefill graphs, are in no other test, because CPU engines do without
them.
"""

import re
from pathlib import Path

import pytest

from tests.tools import unpacked
from tools.engine_settings import PAGE, all_asked, parts_of, resolved, table


def test_the_table_has_every_configuration():
    """A quick test. If it fails, `python tools/engine_settings.py --write` makes the table anew."""
    rows = re.findall(r"^\| (`[^|]+) \|", parts_of(PAGE.read_text())[1], flags=re.M)
    shown = sorted(name for row in rows for name in re.findall(r"`([^`]+)`(?:,|$)", row))
    with_rollouts = [
        path.stem
        for path in sorted(Path("configs").glob("*.yaml"))
        if re.search("^rollout:", path.read_text(), re.M)
    ]
    assert shown == with_rollouts


@pytest.mark.slow
def test_the_table_is_what_sglang_decides():
    unpacked("sglang==0.5.17")
    with all_asked() as given:
        assert parts_of(PAGE.read_text())[1] == table(resolved(given))


@pytest.mark.slow
def test_a_default_that_this_project_departs_from_would_be_seen():
    """One engine without this project's arguments, and with the user's own settings for NCCL."""
    unpacked("sglang==0.5.17")
    with all_asked() as given:
        usual = given["`qwen3_8b_1node`"]
        graphs = {
            name: value for name, value in usual["arguments"].items() if name != "cuda_graph_backend_prefill"
        }
        nccl = {"NCCL_CUMEM_ENABLE": "1", "NCCL_NVLS_ENABLE": "1"}
        cases = {
            "usual": usual,
            "its own graphs": usual | {"arguments": graphs},
            "float32": usual | {"arguments": {**graphs, "dtype": "float32"}},
            "the user's NCCL": usual | {"environment": usual["environment"] | nccl},
        }
        found = resolved(cases)
    assert {name: case["prefill_graphs"] for name, case in found.items()} == {
        "usual": "disabled",
        "its own graphs": "breakable",
        "float32": "breakable",
        "the user's NCCL": "disabled",
    }
    # FlashAttention 3 has no kernels for float32. SGLang chooses it all the same, so sglang/arguments.py does
    # not leave the choice to it.
    assert found["float32"]["attention"] == "fa3"
    assert {name: found["the user's NCCL"][name] for name in nccl} == nccl
