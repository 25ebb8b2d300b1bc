"""miles' dumps: a file for each rank, with tensor-parallel copies and context-parallel slices."""

import itertools
from pathlib import Path

import pytest
from dump_files import drawn

from rlk_align.errors import DumpError
from rlk_align.logs.readers.zigzag import response_tokens

torch = pytest.importorskip("torch")
SHAPES = [(13, 9), (8, 3), (20, 19), (5, 1)]
"""(total, response) of each sample."""


def whole(shard: int) -> list[dict]:
    return [
        {
            "tokens": torch.arange(total) + 100 * shard,
            "response_lengths": response,
            "loss_masks": torch.ones(response, dtype=torch.int64),
            "rollout_log_probs": torch.tensor(drawn(10 * shard + i, response)),
            "log_probs": torch.tensor(drawn(10 * shard + i + 1000, response)),
        }
        for i, (total, response) in enumerate(SHAPES)
    ]


def zigzag(values: "torch.Tensor", total: int, rank: int, ranks: int) -> "torch.Tensor":
    """A rank's slice, token by token: chunk r and chunk 2n-1-r of the logits."""
    chunk = -(-total // (2 * ranks))
    response = len(values)
    kept = []
    for part in (rank, 2 * ranks - 1 - rank):
        for logit in range(part * chunk, (part + 1) * chunk):
            scored = logit + 1 - (total - response)
            if 0 <= scored < response:
                kept.append(values[scored])
    return torch.stack(kept) if kept else values[:0]


def dump(
    *, cp: int = 1, tp: int = 1, dp: int = 1, meta: bool = True, rollout: int = 4
) -> list[Path]:
    """Writes a rollout; ranks count tensor first, then context, then data."""
    paths = []
    Path("train_data").mkdir(exist_ok=True)
    for rank, (d, c, _) in enumerate(itertools.product(range(dp), range(cp), range(tp))):
        samples = whole(d)
        if cp > 1:
            for sample in samples:
                for name in ("rollout_log_probs", "log_probs"):
                    sample[name] = zigzag(sample[name], len(sample["tokens"]), c, cp)
        data = {name: [sample[name] for sample in samples] for name in samples[0]}
        value = {"rollout_id": rollout, "rank": rank, "rollout_data": data}
        if meta:
            value |= {"cp_rank": c, "cp_size": cp, "qkv_format": "thd"}
        paths.append(Path(f"train_data/{rollout}_{rank}.pt"))
        torch.save(value, paths[-1])
    return paths


def changed(path: Path, change) -> None:
    value = torch.load(path, weights_only=True)
    change(value)
    torch.save(value, path)


@pytest.mark.parametrize("meta", [True, False])
@pytest.mark.parametrize(
    ("cp", "tp", "dp"), [(1, 1, 1), (1, 2, 2), (2, 1, 1), (2, 2, 2), (4, 2, 1)]
)
def test_parts_are_put_together(imported, cp: int, tp: int, dp: int, meta: bool) -> None:
    dump(cp=cp, tp=tp, dp=dp, meta=meta)
    manifest, read = imported("auto", ".")
    assert manifest.format == "miles"
    assert len(read) == dp * len(SHAPES)
    assert read.steps.tolist() == [4] * len(read)
    expected = [sample for d in range(dp) for sample in whole(d)]
    assert read.token_ids.tolist() == torch.cat([s["tokens"] for s in expected]).tolist()
    response = read.position >= read.prompt_lengths[read.sequence]
    for name, side in (("rollout_log_probs", read.rollout), ("log_probs", read.train)):
        want = torch.cat([sample[name] for sample in expected]).double()
        assert side[response].tolist() == want.tolist()
    assert (read.scored == response).all()
    assert any("copies" in note for note in manifest.notes) == (tp > 1)
    assert len(manifest.sources) == cp * tp * dp


def test_copies_that_differ_are_refused(imported) -> None:
    for meta in (True, False):
        paths = dump(tp=2, meta=meta)
        changed(paths[1], lambda value: value["rollout_data"]["log_probs"][0].add_(1e-6))
        with pytest.raises(DumpError, match="copies differ"):
            imported("miles", ".")


def test_a_slice_that_is_not_there_is_refused(imported) -> None:
    for meta in (True, False):
        dump(cp=2, meta=meta)[1].unlink()
        with pytest.raises(DumpError, match="context"):
            imported("miles", ".")


def test_slices_that_do_not_say_their_rank_and_are_of_equal_length_are_refused(imported) -> None:
    """Each of two ranks has half of the response."""
    paths = dump(cp=2, meta=False)
    for path in paths:

        def shorten(value: dict) -> None:
            data = value["rollout_data"]
            for name, column in data.items():
                data[name] = column[3:4]
            data["tokens"] = [torch.arange(17)]
            data["response_lengths"] = [16]
            data["loss_masks"] = [torch.ones(16)]
            for name in ("log_probs", "rollout_log_probs"):
                full = torch.tensor(drawn(5, 16))
                data[name] = [full[:8] if value["rank"] else full[8:]]

        changed(path, shorten)
    with pytest.raises(DumpError, match="positions of its context-parallel slices are unknown"):
        imported("miles", ".")


def test_a_slice_of_another_length_is_refused(imported) -> None:
    paths = dump(cp=2)

    def shorten(value: dict) -> None:
        column = value["rollout_data"]["log_probs"]
        column[0] = column[0][:-1]

    changed(paths[0], shorten)
    with pytest.raises(DumpError, match="log_probs of sample 0 has"):
        imported("miles", ".")


def test_padded_sequences_need_the_length_that_they_were_padded_to(imported) -> None:
    paths = dump(cp=2)
    for path in paths:
        changed(path, lambda value: value.update(qkv_format="bshd"))
    with pytest.raises(DumpError, match="max_seq_lens"):
        imported("miles", ".")


def test_ranks_that_hold_whole_responses_are_copies(imported) -> None:
    for rank, path in enumerate(dump(tp=2)):
        changed(path, lambda value, rank=rank: value.update(cp_rank=rank, cp_size=2))
    _, read = imported("miles", ".")
    assert len(read) == len(SHAPES)


def test_samples_of_equal_tokens_are_told_apart_by_their_index(imported) -> None:
    for rank, path in enumerate(dump(tp=2)):
        indices = [4 * rank + i for i in range(4)]
        changed(path, lambda value, own=indices: value["rollout_data"].update(sample_indices=own))
    _, read = imported("miles", ".")
    assert len(read) == 2 * len(SHAPES)


def test_rollouts_come_in_order(imported) -> None:
    for rollout in (10, 9):
        dump(rollout=rollout)
    _, read = imported("miles", "train_data")
    assert read.steps.tolist() == [9] * 4 + [10] * 4


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("padded", [None, 32])
def test_each_token_of_a_response_has_one_place(ranks: int, padded: int | None) -> None:
    for total in range(2, 21):
        for response in range(1, total):
            places = [response_tokens(total, response, r, ranks, padded) for r in range(ranks)]
            assert sorted(p for part in places for p in part) == list(range(response))
