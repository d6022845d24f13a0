"""SGLang's rotary embeddings equal the trainer's for every scaling, beyond the original context too."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from grpo_megatron.model.families import read_architecture
from tests.models import KIMI_K2, YARN, tiny_model

SCALINGS = {
    "default": {},
    "linear": {"factor": 3.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": YARN | {"factor": 9.0},
    "yarn between channels": YARN | {"beta_fast": 16, "truncate": False},
    "yarn with DeepSeek's factors": YARN | {"mscale": 0.7, "mscale_all_dim": 1.2},
}
CASES = [
    (family, scaling) for family in ("llama3", "qwen3", "glm4_moe", "minimax_m2") for scaling in SCALINGS
]


def written(root: Path, family: str, scaling: str) -> str:
    folder = root / family / scaling.replace(" ", "-")
    rope = SCALINGS[scaling] | {"rope_theta": 10000.0, "rope_type": scaling.split()[0]}
    if family in ("glm4_moe", "minimax_m2"):
        rope["partial_rotary_factor"] = 0.5
    return tiny_model(folder, family, num_hidden_layers=1, rope_parameters=rope)


def expected(arch, positions: int) -> torch.Tensor:
    angle = torch.arange(positions, dtype=torch.float32)[:, None] * arch.rope_frequencies()
    return torch.cat([angle.cos(), angle.sin()], dim=-1) * arch.rope_factor


@pytest.mark.slow
def test_tables_of_cosines(tmp_path):
    folders = [written(tmp_path, *case) for case in CASES]
    folders.append(tiny_model(tmp_path / "deepseek", "deepseek_v3", num_hidden_layers=2))
    kimi = Path(tiny_model(tmp_path / "kimi", "deepseek_v3", num_hidden_layers=2, **KIMI_K2))
    config = json.loads((kimi / "config.json").read_text())
    (kimi / "config.json").write_text(json.dumps(config | {"model_type": "kimi_k2"}))
    folders.append(str(kimi))
    subprocess.run(
        [sys.executable, "-m", "tests.integration.rotary_tables", str(tmp_path / "tables"), *folders],
        check=True,
        env=os.environ | {"SGLANG_PLATFORM": "grpo_cpu"},
        timeout=600,
    )
    tables = torch.load(tmp_path / "tables")
    assert len(tables) == len(CASES) + 2
    for folder, table in zip(folders, tables, strict=True):
        arch = read_architecture(folder)
        assert len(table) >= arch.max_positions == 8 * YARN["original_max_position_embeddings"], folder
        ours = expected(arch, len(table))
        torch.testing.assert_close(table, ours, rtol=0, atol=2e-4, msg=folder)
        other = expected(replace(arch, rope_theta=arch.rope_theta * 1.1), len(table))
        assert (table - other).abs().max() > 1e-2, folder
