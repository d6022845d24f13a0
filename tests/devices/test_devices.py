"""Weight sync and sleep with two devices in one process.

A tensor on the wrong device is an error, unlike on a CPU.
"""

import multiprocessing
import shutil
from concurrent.futures import ProcessPoolExecutor

import pytest

from tests.devices import checks, fake

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def process(tmp_path_factory):
    """A process that has the fake devices."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("there is no C++ compiler (c++)")
    library = fake.build(tmp_path_factory.mktemp("fake"), compiler)
    with ProcessPoolExecutor(
        1, mp_context=multiprocessing.get_context("spawn"), initializer=fake.install, initargs=(library,)
    ) as pool:
        yield pool


@pytest.mark.parametrize(
    "check",
    [
        checks.over_shared_memory,
        checks.as_deltas,
        checks.over_files,
        checks.to_two_engines,
        checks.through_sglangs_weight_loader,
        checks.parked_in_files,
        checks.parked_in_memory,
    ],
)
def test_every_tensor_is_on_the_device_of_its_rank(tmp_path, process, check):
    """Schedulers of a TP2 engine used to open all parcels on device 0 and to copy between devices."""
    process.submit(check, str(tmp_path)).result(timeout=120)


@pytest.mark.parametrize("fault", checks.FAULTS)
def test_a_tensor_on_another_device_is_an_error(tmp_path, process, fault):
    """Otherwise the fake devices would prove nothing."""
    process.submit(checks.with_fault, str(tmp_path), fault).result(timeout=120)
