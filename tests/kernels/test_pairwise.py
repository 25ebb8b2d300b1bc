from itertools import combinations, product

import pytest
from covering import pairwise


@pytest.mark.parametrize("sizes", [(3, 6, 2), (2, 3, 2, 2), (2, 4, 2, 2), (3, 3, 3), (4, 1)])
def test_every_two_values_meet(sizes):
    parameters = [[f"{k}{i}" for i in range(size)] for k, size in enumerate(sizes)]
    chosen = pairwise(*parameters)
    for (i, first), (j, second) in combinations(enumerate(parameters), 2):
        assert {(row[i], row[j]) for row in chosen} == set(product(first, second))
    assert len(chosen) <= 1.5 * max(a * b for a, b in combinations(sizes, 2))
    assert chosen == pairwise(*parameters)
