import pytest


@pytest.fixture(scope="session")
def ranks():
    from tests.ranks import RankPool

    pool = RankPool()
    yield pool
    pool.close()
