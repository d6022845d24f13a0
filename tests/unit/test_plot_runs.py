"""tools/plot_runs.py: curves from TensorBoard logs."""

import subprocess
import sys

import numpy as np
import pytest
from PIL import Image
from plot_runs import read_scalar
from torch.utils.tensorboard import SummaryWriter


def log(folder, values: dict[int, float], name="eval/mean@4"):
    writer = SummaryWriter(str(folder))
    for step, value in values.items():
        writer.add_scalar(name, value, step)
    writer.close()


def plot(*arguments):
    return subprocess.run(
        [sys.executable, "tools/plot_runs.py", *map(str, arguments)], capture_output=True, text=True
    )


def test_every_point_is_read(tmp_path):
    values = {step: step / 7 for step in range(0, 20000, 5)}
    log(tmp_path / "run" / "tensorboard", values)
    steps, read = read_scalar(tmp_path / "run", "eval/mean@4")
    assert steps == list(values)
    np.testing.assert_allclose(read, list(values.values()), rtol=1e-6)


def test_a_resumed_run_is_one_curve(tmp_path):
    log(tmp_path, {0: 0.1, 1: 0.2, 2: 0.3})
    log(tmp_path / "resumed", {2: 0.5, 3: 0.6})  # sorted after: its files lie in a folder
    steps, values = read_scalar(tmp_path, "eval/mean@4")
    assert steps == [0, 1, 2, 3]
    np.testing.assert_allclose([values[0], values[1], values[3]], [0.1, 0.2, 0.6], rtol=1e-6)


@pytest.mark.slow
def test_the_picture_shows_a_curve_for_each_run(tmp_path):
    log(tmp_path / "a", {0: 0.0, 10: 1.0})
    log(tmp_path / "b", {0: 1.0, 10: 0.0})
    done = plot(tmp_path / "one.png", tmp_path / "a")
    assert done.returncode == 0, done.stderr
    assert plot(tmp_path / "two.png", tmp_path / "a", f"other={tmp_path / 'b'}").returncode == 0
    one, two = (
        np.asarray(Image.open(tmp_path / name).convert("RGB")).astype(int) for name in ("one.png", "two.png")
    )
    assert one.shape == two.shape == (546, 910, 3)
    coloured = [(np.ptp(picture, axis=2) > 60).sum() for picture in (one, two)]
    assert coloured[0] > 500
    assert coloured[1] > 1.7 * coloured[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{0}/none"], "contains no TensorBoard logs"),
        (["{0}/a", "--scalar", "eval/mean"], "has no scalar eval/mean; set --scalar to one of eval/mean@4"),
        (["{0}/a", "x/a={0}/a", "a={0}/a"], "two curves are called a"),
    ],
)
def test_what_is_missing_is_named(tmp_path, arguments, message):
    log(tmp_path / "a", {0: 0.0})
    done = plot(tmp_path / "x.png", *[text.format(tmp_path) for text in arguments])
    assert done.returncode != 0
    assert message in done.stderr
    assert not (tmp_path / "x.png").exists()
