"""Recorded rows by row number, with a cache of any size."""

from pathlib import Path

import numpy as np
import pytest
import torch
from synthetic import BATCH, NAMES, draw, write_pass

from rlk_align.model.sites import RowIndex
from rlk_align.trace import values as module
from rlk_align.trace.reader import PassReader
from rlk_align.trace.values import RecordedRows

INDEX = RowIndex(BATCH)


def written(folder: Path, values: dict[str, torch.Tensor]) -> PassReader:
    write_pass(folder / "prefill", values)
    return PassReader(folder / "prefill")


def everything(recorded: RecordedRows, site: str) -> list[np.ndarray]:
    found = recorded.values(site, np.flatnonzero(recorded.has_value(site)))
    masks = [recorded.present(site), recorded.finite(site), recorded.digests(site)]
    return [found.contiguous().view(torch.uint8).numpy(), *masks]


def test_a_small_bound_drops_sites_and_reads_them_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = written(tmp_path, draw())
    whole = RecordedRows(reader, INDEX)
    expected = {site: everything(whole, site) for site in NAMES}
    read = []
    monkeypatch.setattr(reader, "rows", lambda s: (read.append(s), PassReader.rows(reader, s))[1])
    one_site = sum(c.nbytes for c in expected["embed"][1:]) + 12 * len(INDEX)
    monkeypatch.setattr(module, "CACHE_BYTES", 3 * one_site)
    bounded = RecordedRows(reader, INDEX)
    for site in [*NAMES, *NAMES[-3:], *NAMES]:
        for got, wanted in zip(everything(bounded, site), expected[site], strict=True):
            assert np.array_equal(got, wanted)
    # Only the last three are in the cache.
    assert read == [*NAMES, *NAMES]


def test_a_value_that_is_not_finite_is_kept_and_known(tmp_path: Path) -> None:
    values = draw()
    values["embed"][1, 0] = torch.nan
    values["embed"][2, 0] = torch.inf
    recorded = RecordedRows(written(tmp_path, values), INDEX)
    assert (recorded.has_value("embed") & ~recorded.finite("embed")).nonzero()[0].tolist() == [1, 2]
    assert not recorded.present("no_site").any()
