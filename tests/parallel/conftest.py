import pytest

from tests.ranks import rank_pool


@pytest.fixture(scope="package")
def ranks():
    with rank_pool() as pool:
        yield pool
