"""The arithmetic on one tile of logits as a GPU runs it: as one graph, which torch.compile makes once."""

import pytest
import torch
from torch._dynamo import config as dynamo

from grpo_megatron.megatron.head import tiles
from grpo_megatron.megatron.head.tiles import Coefficients, Tile

SHAPES = [(64, 128), (37, 128), (64, 100), (33, 7), (5, 600)]
# Tiles are views of a larger memory, as in Projection.
MEMORY = 64 * 128


def tile(words: tuple[int, int], dtype: torch.dtype, in_place: bool) -> Tile:
    rows, columns = words
    product = torch.randn(MEMORY, generator=torch.Generator().manual_seed(rows)).to(dtype)
    product = product[: rows * columns].view(rows, columns)
    scale = None if dtype == torch.float32 else torch.full((1,), 1 / 0.7)
    return Tile(product, scale, torch.empty(words) if in_place else None)


def arguments(shape: tuple[int, int], dtype: torch.dtype, reference: bool, in_place: bool):
    """Return arguments of `add_tile` and of `tile_gradient`. in_place: as on a CPU, otherwise as on a GPU."""
    rows, columns = shape
    rng = torch.Generator().manual_seed(1)
    kinds, models = (5, 2) if reference else (3, 1)
    sums, maximum = torch.rand(rows, kinds, generator=rng), torch.randn(rows, models, generator=rng)
    column = torch.randint(columns, (rows, 1), generator=rng)
    inside = torch.rand(rows, generator=rng) > 0.5
    of_gradient = [torch.randn(rows, generator=rng) for _ in range(4)]
    of_gradient[2] = of_gradient[2] if reference else None

    def both():
        return tile(shape, dtype, in_place), tile(shape, dtype, in_place) if reference else None

    memory = torch.empty(shape) if in_place else None
    return (
        (sums, maximum, *both(), column, inside, memory),
        (Coefficients(*of_gradient), maximum + 10, *both(), column, memory, dtype),
    )


@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_graph_for_all_shapes_gives_what_a_cpu_computes(monkeypatch, dtype, reference):
    """Views of larger tensors as arguments had a graph compiled whenever two sizes happened to be equal."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "0")  # the import of grpo_megatron.megatron sets it on a CPU
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    with torch.no_grad(), dynamo.patch(disable=False):
        for index, function in enumerate((tiles.add_tile, tiles.tile_gradient)):
            torch.compiler.reset()
            graphs.clear()
            compiled = torch.compile(function, dynamic=True, fullgraph=True, backend=count)
            for shape in SHAPES:
                expected = function(*arguments(shape, dtype, reference, in_place=True)[index])
                found = compiled(*arguments(shape, dtype, reference, in_place=False)[index])
                for value, exact in zip(found, expected, strict=True):
                    torch.testing.assert_close(value, exact)
            assert len(graphs) == 1, function
