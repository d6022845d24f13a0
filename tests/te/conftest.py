import pytest

from tests.ranks import rank_pool


@pytest.fixture(scope="package")
def te_ranks():
    with rank_pool(emulate_kernels=True) as pool:
        yield pool
