"""After one optimiser step, the trainer's weights are synced to the live vLLM: all bits are equal
again, and a stale layer is named."""

import functools
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from bit_equal import Bits
from command import Cli, Outcome, require_engine, write_few_prompts
from gloo_ranks import on_ranks
from pair_models import MODELS
from safetensors.torch import load_file, save_file

from rlk_align.data import data_path

PATCHES = Path(__file__).resolve().parents[1] / "cli"
UPDATE = "patches:update_weights"
whole_matrix = pytest.mark.whole_matrix


@pytest.fixture(scope="module")
def stepped(folder: Path) -> Callable[[str], Path]:
    """A model with other weights: the embedded one after one step of AdamW, computed with the
    kernels, and the sparse one with noise of 2 %."""

    @functools.cache
    def model(name: str) -> Path:
        old, new = MODELS[name].path, folder / f"stepped-{name}"
        shutil.copytree(old, new)
        if name == "embedded":
            one_step().save_pretrained(new)
            return new
        generator = torch.Generator().manual_seed(0)
        tensors = {
            key: w * (1 + 0.02 * torch.randn(w.shape, generator=generator)).to(w.dtype)
            for key, w in load_file(old / "model.safetensors").items()
        }
        save_file(tensors, new / "model.safetensors", {"format": "pt"})
        return new

    return model


def one_step() -> Any:
    """The embedded model in bf16 after a step of AdamW in fp32."""
    from rlk_kernels.integrations import hf
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(data_path("model"), dtype=torch.float32)
    hf.use_kernels(model.train())
    ids = torch.randint(2, 1000, (2, 40), generator=torch.Generator().manual_seed(0))
    logits = model(ids, use_cache=False).logits[:, :-1]
    logprobs = hf.token_logprobs(logits.flatten(0, 1), ids[:, 1:].flatten())
    advantage = torch.tensor([1.0, -1.0]).repeat_interleave(39)
    (-(logprobs * advantage).mean()).backward()
    torch.optim.AdamW(model.parameters(), lr=1e-3).step()
    return model.to(torch.bfloat16)


@pytest.fixture(scope="module")
def compare(folder: Path, cli: Cli, stepped: Callable[[str], Path]) -> Cli:
    """vLLM loads the old weights and gets the new ones by its own `load_weights`; the trainer has
    loaded the new ones."""
    require_engine("vllm")
    prompts = write_few_prompts(folder / "few.jsonl")

    def run(
        *args: object, name: str = "embedded", train: str = "hf", stale: str = "", tp: int = 1
    ) -> Outcome:
        old, new = MODELS[name].path, stepped(name)
        return cli(
            *("compare", "--model", new, "--prompts", prompts, "--max-new-tokens", 8),
            *("--rollout", f"vllm:kernels=rlk,tp={tp},model={old},patch={UPDATE}"),
            *("--train", f"{train}{',' if ':' in train else ':'}kernels=rlk"),
            *("--contract", "bitwise", *args),
            env={
                **{"PYTHONPATH": str(PATCHES), "RLK_TEST_NEW": str(new)},
                "RLK_TEST_STALE": stale,
            },
            # The variables determine the contents of these captures.
            shared=False,
        )

    return run


def assert_equal_bits(done: Outcome) -> None:
    assert done.code == 0, done.out + done.err
    assert done.verdict is not None
    assert done.verdict["precheck"]["mismatches"] == []
    assert all(e["bit_mismatches"] == 0 for e in done.verdict["edges"].values())


@pytest.mark.parametrize(
    ("name", "train", "tp"),
    [
        *(("embedded", "hf", 1), ("embedded", "megatron", 1)),
        # Here ranks have rows of row-parallel products; a trainer's ranks have columns.
        pytest.param("embedded", "megatron:tp=2", 2, marks=whole_matrix),
        pytest.param("embedded", "megatron:tp=2,sp=1", 1, marks=whole_matrix),
        pytest.param("embedded", "fsdp:dp=2", 2, marks=whole_matrix),
        pytest.param("sparse", "hf", 2, marks=whole_matrix),
    ],
)
def test_a_weight_update_keeps_every_bit(
    compare: Cli, folder: Path, name: str, train: str, tp: int
) -> None:
    require_engine(train.partition(":")[0])
    done = compare("--run-dir", folder / f"synced-{name}", name=name, train=train, tp=tp)
    assert_equal_bits(done)


@pytest.mark.parametrize(
    ("stale", "weights", "first"),
    [
        ("layers.2.", "layers.2.q_proj", "layers.2.q_proj"),
        ("layers.3.mlp.down_proj", "layers.3.down_proj", "layers.3.down_proj"),
    ],
)
def test_a_stale_layer_is_named(
    compare: Cli, folder: Path, stale: str, weights: str, first: str
) -> None:
    done = compare("--run-dir", folder / f"stale-{len(stale)}", stale=stale)
    assert done.code == 4
    assert done.verdict is not None
    named = [m["name"] for m in done.verdict["precheck"]["mismatches"]]
    assert weights in named
    assert all(stale.split(".")[1] == name.split(".")[1] for name in named)
    across = compare(
        "--run-dir", folder / f"stale-{len(stale)}", "--allow-mismatch", "weights", stale=stale
    )
    assert across.first == first, across.out
    assert across.verdict is not None
    assert across.verdict["edges"]["prefill_vs_train"]["bit_mismatches"] > 0


def _step_of_ranks(group: Any, folder: Path) -> None:
    """AdamW in Megatron on two ranks, each on its shards; rank 0 writes the export."""
    from rlk_align.engines.common.weights import canonical
    from rlk_align.engines.megatron.engine import MegatronEngine
    from rlk_align.engines.patch import patch_of
    from rlk_align.engines.process.ranks import Ranks, all_gather
    from rlk_align.engines.spec import EngineSpec
    from rlk_align.model.checkpoint import tensor_name
    from rlk_align.model.shape import read_shape

    spec, model = EngineSpec.parse("megatron:tp=2,sp=1,kernels=rlk"), data_path("model")
    engine = MegatronEngine(spec, model, read_shape(model))
    engine.ranks = ranks = Ranks(group.rank(), group.size(), torch.device("cpu"))
    engine.kernels = patch_of(spec)
    engine.open()
    ids = torch.randint(2, 1000, (2, 40), generator=torch.Generator().manual_seed(0))
    at = torch.arange(40).expand(2, 40)
    engine.model(ids, at, None, labels=ids.roll(-1, 1))[:, :-1].mean().backward()
    # Gradients of norms are whole on rank 0; a trainer adds them up over ranks.
    for name, parameter in engine.model.named_parameters():
        if "norm" in name:
            torch.distributed.all_reduce(parameter.grad)
    torch.optim.AdamW(engine.model.parameters(), lr=1e-2).step()
    live = {name: p.detach() for name, p in engine.model.named_parameters()}
    every = canonical(engine.plan, live.get, partial(all_gather, ranks=ranks))
    tensors = {tensor_name(p.name): p.value.contiguous() for p in every}
    if group.rank() == 0:
        tensors.pop("lm_head.weight")  # Tied to the embedding.
        save_file(tensors, folder / "model.safetensors")


@whole_matrix
@pytest.mark.parametrize("tp", [1, 2])
def test_what_ranks_trained_is_what_ranks_sample_from(cli: Cli, folder: Path, tp: int) -> None:
    """After a step of AdamW in Megatron on two ranks, the merged shards are loaded into the live
    vLLM by its own `load_weights`: every bit of a rollout is that of the trained model."""
    require_engine("vllm")
    require_engine("megatron")
    trained = folder / "trained"
    if not trained.exists():
        shutil.copytree(data_path("model"), trained)
        on_ranks(2, _step_of_ranks, trained)
    new, old = (load_file(f / "model.safetensors") for f in (trained, data_path("model")))
    assert new.keys() == old.keys()
    assert sum(not torch.equal(new[name], old[name]) for name in old) > 40
    done = cli(
        *("compare", "--model", trained, "--prompts", write_few_prompts(folder / "few.jsonl")),
        *("--rollout", f"vllm:kernels=rlk,tp={tp},model={data_path('model')},patch={UPDATE}"),
        *("--train", "megatron:tp=2,kernels=rlk", "--max-new-tokens", 8, "--contract", "bitwise"),
        *("--run-dir", folder / "trained-run"),
        env={"PYTHONPATH": str(PATCHES), "RLK_TEST_NEW": str(trained)},
        shared=False,
    )
    assert_equal_bits(done)


@whole_matrix
@pytest.mark.parametrize(
    ("name", "tensor", "parameter"),
    [
        ("embedded", "layers.3.mlp.down_proj", "layers.3.down_proj"),
        ("sparse", "layers.2.mlp.experts.3.down_proj", "layers.2.experts.3.down_proj"),
    ],
)
def test_a_stale_shard_is_named_with_its_rank(
    compare: Cli, folder: Path, name: str, tensor: str, parameter: str
) -> None:
    run = folder / f"stale-shard-{name}"
    done = compare("--run-dir", run, name=name, stale=f"rank 1: {tensor}", tp=2)
    assert done.code == 4, done.out + done.err
    assert done.verdict is not None
    (mismatch,) = done.verdict["precheck"]["mismatches"]
    assert (mismatch["name"], mismatch["ranks"]) == (parameter, [1])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("embedded", {"enable_prefix_caching": True}),
        pytest.param("sparse", {"tensor_parallel_size": 2}, marks=whole_matrix),
    ],
)
def test_weights_reloaded_into_the_live_vllm_keep_every_bit(
    vllm_bits: Bits, stepped: Callable[[str], Path], name: str, options: dict[str, Any]
) -> None:
    """vLLM's `reload_weights` loads them between two rollouts, as its weight transfer loads a
    layer. The engine that loads them when it starts is one rank."""
    old, new = str(MODELS[name].path), str(stepped(name))
    on = {"kernels": "registered", "options": options, "model": old}
    fresh = {"kernels": "registered", "name": "fresh", "model": new}
    cases = [on | {"name": "before"}, on | {"name": "reloaded", "reload": new}, fresh]
    found = vllm_bits(cases, step=10)
    for what in ("tokens", "decode", "prefill"):
        assert found["reloaded"][what] == found["fresh"][what], what
    assert found["reloaded"]["decode"] == found["reloaded"]["prefill"]
    assert found["reloaded"]["decode"] != found["before"]["decode"]
