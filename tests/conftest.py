import pytest
from hypothesis import settings

# First examples pay for imports; timing is not what these tests are about.
settings.register_profile("default", deadline=None)
settings.load_profile("default")


@pytest.fixture(scope="session")
def ranks():
    from tests.ranks import RankPool

    pool = RankPool()
    yield pool
    pool.close()
