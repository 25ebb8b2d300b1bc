"""Shards of several ranks: who records what, what is refused, and how shards become one pass."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import on_ranks
from safetensors.torch import load_file
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM

from rlk_align import record
from rlk_align.data import data_path
from rlk_align.errors import BadOption, RlkError
from rlk_align.record.merge.history import Digests, old_values, read_digests
from rlk_align.record.merge.recorded import Recorded, open_step
from rlk_align.record.shared.choose import prefix_hash
from rlk_align.record.shared.layout import step_folder
from rlk_align.trace.digest import digest_parameter
from rlk_align.trace.reader import PassReader
from rlk_align.trace.renumber import renumber_passes

pytestmark = pytest.mark.whole_matrix

PROMPTS = [[5, 40, 300, 7], [11, 12, 13], [21, 500, 8, 9, 10, 77], [60, 61]]
RESPONSES = [[30, 31, 32], [45, 46, 47, 48, 49], [90], [17, 18, 19, 20]]
SEQUENCES = [p + r for p, r in zip(PROMPTS, RESPONSES, strict=True)]


def sharded() -> Any:
    model = AutoModelForCausalLM.from_pretrained(data_path("model"), dtype=torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def score(model: Any, order: list[int]) -> None:
    for i in order:
        model(input_ids=torch.tensor([SEQUENCES[i]]), use_cache=False)


def said(act: Any) -> str:
    """The error that an act raises."""
    try:
        act()
    except RlkError as error:
        return f"{type(error).__name__}: {error.message}"
    return "nothing"


def chosen_in(step: Path) -> list[list[int]]:
    return sorted(list(s.ids) for s in open_step(step).sequences.values())


def merged(recorded: Recorded, folder: Path, name: str) -> PassReader:
    keys = list(recorded.sequences)
    sources = [(s.folder / name, recorded.numbers(s, keys)) for s in recorded.shards]
    renumber_passes(sources, folder)
    return PassReader(folder)


def _chosen(group: Any, folder: Path) -> None:
    model = sharded()
    for count in (1, 3):
        out = str(folder / str(count))
        recorder = record.trainer(model, out, sequences=count, every=1, weights=False)
        own = [0, 1] if group.rank() == 0 else [2, 3]
        with recorder.step(0, PROMPTS):
            score(model, own)
        with recorder.step(1, PROMPTS):  # the last micro-batch of a rank may be anything
            score(model, own if group.rank() == 0 else [2, 2])


def test_ranks_record_the_lowest_sequences_of_all_of_them(tmp_path: Path) -> None:
    on_ranks(2, _chosen, tmp_path)
    lowest = sorted(SEQUENCES, key=lambda ids: (prefix_hash(prompt_of(ids)), prefix_hash(ids)))
    for count in (1, 3):
        step = step_folder(tmp_path / str(count), 0)
        assert chosen_in(step) == sorted(lowest[:count])
        without = [ids for ids in lowest if ids != SEQUENCES[3]]
        assert chosen_in(step_folder(tmp_path / str(count), 1)) == sorted(without[:count])
    recorded = open_step(step_folder(tmp_path / "3", 0))
    reader = merged(recorded, tmp_path / "merged", "prefill")
    ranks = {h.sample: h.rank for h in reader.record.held}
    for number, ids in enumerate(map(list, (s.ids for s in recorded.sequences.values()))):
        assert ranks[number] == SEQUENCES.index(ids) // 2
    rows = reader.rows("logits")
    assert rows is not None
    assert len(rows.sample) == sum(len(ids) - len(prompt_of(ids)) for ids in lowest[:3])
    # Each row is read from the file of its own rank.
    assert set((rows.shard // 100_000).tolist()) == {h.rank for h in reader.record.held}
    values = reader.values("logits", rows, torch.arange(len(rows.sample)).numpy())
    assert torch.isfinite(values).all()


def prompt_of(ids: list[int]) -> list[int]:
    return PROMPTS[SEQUENCES.index(ids)]


def _refused(group: Any, folder: Path) -> list[str]:
    model, rank = sharded(), group.rank()
    first = record.trainer(model, str(folder), every=1, weights=False)

    def again() -> None:
        record.trainer(model, str(folder), every=1, weights=False)

    def step(number: int, fails: bool = False) -> None:
        with first.step(number, PROMPTS):
            score(model, [rank])
            if fails and rank == 1:
                raise BadOption("rank 1 fails")

    words = [said(again)]
    step(0)
    words.append(said(lambda: step(0)))
    words.append(said(lambda: step(1, fails=True)))
    words.append(said(lambda: step(1)))
    first.close()
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder / "step-00000000/rank-0")
    dist.barrier()
    second = record.trainer(model, str(folder), every=1, weights=False)

    def late() -> None:
        with second.step(0, PROMPTS):
            score(model, [rank])

    return [*words, said(late)]


def test_what_one_rank_meets_every_rank_raises(tmp_path: Path) -> None:
    for words in on_ranks(2, _refused, tmp_path / "job"):
        locked, twice, failed, half, late = words
        assert "another process records into this folder" in locked
        assert "step 0 is recorded already" in twice
        # The shard of rank 0 is complete, and rank 1 lost its own.
        assert "step 1 is recorded already" in half
        assert "has rank-0" in half
        assert "has rank-1" in late
        assert failed in ("nothing", "BadOption: rank 1 fails")
    recorded = open_step(step_folder(tmp_path / "job", 1))
    assert recorded.lost == [1]
    assert [list(s.ids) for s in recorded.sequences.values()] == [SEQUENCES[0]]
    # The shards of another job do not belong to the step.
    on_ranks(2, _refused, tmp_path / "other")
    of_another = step_folder(tmp_path / "other", 0) / "rank-1"
    shutil.copytree(of_another, step_folder(tmp_path / "job", 1) / "rank-1")
    with pytest.raises(BadOption, match="shards of 2 jobs"):
        open_step(step_folder(tmp_path / "job", 1))


def _trained(group: Any, folder: Path) -> None:
    model = sharded()
    recorder = record.trainer(model, str(folder), every=1)
    up = model.model.layers[1].mlp.up_proj.weight
    for step in range(3):
        with recorder.step(step, PROMPTS):
            score(model, [group.rank()])
        model.reshard()
        with torch.no_grad():
            kept = up.to_local().clone()
            for parameter in model.parameters():
                parameter.to_local().mul_(1.03125)
            if step == 0 and group.rank() == 1:
                up.to_local().copy_(kept)


def test_the_side_with_an_old_value_is_named(tmp_path: Path) -> None:
    """Rank 1 does not train its rows of a layer in the first step."""
    on_ranks(2, _trained, tmp_path)
    steps = [open_step(step_folder(tmp_path, step)).about for step in range(3)]
    before, stale, after = map(read_digests, steps)
    name, earlier = "layers.1.up_proj", [(0, before)]
    right = {name: Digests("of a trainer without the fault", stale[name].rows.copy())}
    right[name].rows[len(right[name].rows) // 2 :] += 1
    [said] = old_values({**stale, **right}, stale, earlier).items()
    assert said[0] == name
    assert "the trainer is stale: it has had these rows since step 0" in said[1]
    behind = old_values({**after, name: before[name]}, after, [(1, stale), *earlier])
    assert behind == {name: "the rollout is stale: it has what the trainer had at step 0"}
    # Nothing is said of a layer that changed, or where nothing was trained.
    assert old_values(stale, stale, earlier) == {}
    assert old_values({**before, **right}, before, earlier) == {}
    # The parameters of a step are kept once, as the model computes with them.
    model = steps[1] / "model"
    live = load_file(model / "model-00000-00000.safetensors")
    assert {t.dtype for t in live.values()} == {torch.bfloat16}
    tensor = live["model.layers.1.mlp.up_proj.weight"]
    assert digest_parameter(tensor) == stale[name].whole
    first, second = tensor.float().chunk(2)
    fresh = load_file(data_path("model") / "model.safetensors")["model.layers.1.mlp.up_proj.weight"]
    assert torch.equal(second, fresh.float().chunk(2)[1])
    assert not torch.equal(first, fresh.float().chunk(2)[0])


def _unsupported(group: Any, folder: Path) -> list[str]:
    from torch.distributed.device_mesh import init_device_mesh

    model = AutoModelForCausalLM.from_pretrained(data_path("model"), dtype=torch.bfloat16)

    def trainer(wrapped: Any, **settings: Any) -> str:
        return said(lambda: record.trainer(wrapped, str(folder), **settings))

    words = [trainer(model), trainer(torch.nn.parallel.DistributedDataParallel(model))]
    fully_shard(model.model.layers[0])
    words.append(trainer(model))
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicas", "shards"))
    several = AutoModelForCausalLM.from_pretrained(data_path("model"), dtype=torch.bfloat16)
    words.append(trainer(fully_shard(several, mesh=mesh)))
    words.append(trainer(several, engine="megatron"))
    return words


def test_what_is_refused_by_name(tmp_path: Path) -> None:
    for words in on_ranks(2, _unsupported, tmp_path):
        plain, replicas, part, mesh, other = words
        assert "a trainer of 2 ranks without FSDP2 or DeepSpeed is not recorded" in plain
        assert "DistributedDataParallel is not recorded" in replicas
        assert "without FSDP2" in part
        assert "a mesh of [1, 2]" in mesh
        assert "the model is one of 'fsdp'" in other
