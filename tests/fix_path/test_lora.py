"""The kernels with LoRA adapters beside the weights: vLLM, transformers and FSDP2 compute the same
bits, also where one batch has requests of two adapters and of none.

The adapters have ranks and scales of their own, and one of them has no adapter of some projections.
"""

import functools
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from bit_equal import Bits, assert_equal
from command import Cli, require_engine, said_by, write_few_prompts
from gloo_ranks import on_ranks
from lora import PROJECTIONS, write_adapter
from pair_models import MODELS

from rlk_align.data import data_path
from rlk_align.model.prompts import load_prompts
from rlk_align.model.tokenise import tokenise

pytest.importorskip("peft")

MODEL = data_path("model")
IDS = torch.randint(2, 1000, (2, 16), generator=torch.Generator().manual_seed(0))
PATCHES = Path(__file__).parents[1] / "real_runs"


@pytest.fixture(scope="module")
def adapters(folder: Path) -> dict[str, Path]:
    """The scale of b is no power of two."""
    some = ("q_proj", "v_proj", "gate_proj", "down_proj")
    return {
        "a": write_adapter(folder / "a", MODEL, std=0.05),
        "b": write_adapter(folder / "b", MODEL, rank=8, alpha=5.0, targets=some, std=0.05),
    }


def adapted(adapters: dict[str, Path], name: str | None, dtype: torch.dtype) -> Any:
    """The model with one adapter and the kernels, all parameters in a dtype."""
    from peft import PeftModel
    from rlk_kernels.integrations import hf
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=dtype)
    if name is not None:
        PeftModel.from_pretrained(model, adapters[name], is_trainable=True)
    hf.use_kernels(model.to(dtype).eval())
    return model


def bits(values: torch.Tensor) -> str:
    return values.float().numpy().tobytes().hex()


def test_two_adapters_and_none_in_one_batch(vllm_bits: Bits, adapters: dict[str, Path]) -> None:
    from rlk_kernels.integrations import hf

    prompts = sorted(tokenise(MODEL, load_prompts(data_path("prompts.jsonl"))).values(), key=len)
    prompts, names = prompts[::5], ["a", None, "b"]
    cycled = [names[i % 3] for i in range(len(prompts))]
    options = {
        "dtype": "bfloat16", "enable_lora": True, "max_loras": 2, "max_lora_rank": 8,
        "lora_target_modules": list(PROJECTIONS),
    }  # fmt: skip

    def case(name: str, chosen: list[int], **more: Any) -> dict[str, Any]:
        paths = [None if cycled[i] is None else str(adapters[cycled[i]]) for i in chosen]
        return {
            "name": name, "kernels": "registered", "prompts": [prompts[i] for i in chosen],
            "adapters": paths, "options": options | more,
        }  # fmt: skip

    every = list(range(len(prompts)))
    said = vllm_bits([
        case("mixed", every),
        case("chunks of 40, four at a time", every, max_num_batched_tokens=40, max_num_seqs=4),
        case("b alone", every[2::3]),
    ])  # fmt: skip
    mixed = said["mixed"]
    assert len([name for name in mixed["replaced"] if name.endswith(".lora")]) == 4 * 7
    assert {"lora_shrink", "lora_expand"} <= set(mixed["ran"])
    for what in ("tokens", "decode", "prefill"):
        assert said["chunks of 40, four at a time"][what] == mixed[what]
        assert said["b alone"][what] == mixed[what][2::3]
    assert mixed["decode"] == mixed["prefill"]

    models = {name: adapted(adapters, name, torch.bfloat16) for name in names}
    for i, name in enumerate(cycled):
        ids = torch.tensor([prompts[i] + mixed["tokens"][i]])
        with torch.no_grad():
            scores = {
                n: bits(hf.score_tokens(m, ids, last=len(mixed["tokens"][i]))[0])
                for n, m in models.items()
            }
        assert scores.pop(name) == mixed["decode"][i]
        assert mixed["decode"][i] not in scores.values()


@pytest.mark.parametrize("name", ["a", "b"])
@pytest.mark.parametrize(
    "train", ["hf", "fsdp:dp=2", "fsdp:dp=2,mixed=0", "deepspeed:dp=2", "deepspeed:mixed=autocast"]
)
def test_no_bit_differs_with_an_adapter(
    cli: Cli, folder: Path, adapters: dict[str, Path], train: str, name: str
) -> None:
    for engine in ("vllm", train):
        require_engine(engine.partition(":")[0])
    how = f"lora={adapters[name]},kernels=rlk"
    done = cli(
        "compare", "--model", MODEL, "--contract", "bitwise", "--run-dir", folder / "run",
        "--prompts", write_few_prompts(folder / "few.jsonl"),
        "--rollout", f"vllm:{how}", "--train", f"{train}{',' if ':' in train else ':'}{how}",
    )  # fmt: skip
    assert_equal(done, 40)


@pytest.mark.parametrize(
    "name",
    [
        *("grouped", "llama", "mistral", "qwen2", "ernie4_5", "granite", "glm4", "exaone4"),
        *("gemma2", "gemma3", "ministral3"),
    ],
)
def test_no_bit_differs_with_an_adapter_of_another_family(
    cli: Cli, folder: Path, name: str
) -> None:
    """Of the projections that are not fused in the checkpoint."""
    require_engine("vllm")
    model = MODELS[name].stored(folder, name, MODELS[name].dtypes[0])
    adapter = folder / f"{name}-adapter"
    how = f"lora={write_adapter(adapter, model, rank=8, alpha=5.0, std=0.05)},kernels=rlk"
    done = cli(
        "compare", "--model", model, "--contract", "bitwise", "--run-dir", folder / "run",
        "--prompts", write_few_prompts(folder / "few.jsonl"),
        "--rollout", f"vllm:{how}", "--train", f"hf:{how}",
    )  # fmt: skip
    assert_equal(done, 40)


def test_in_production_the_kernels_tell_that_they_computed_the_adapter(
    cli: Cli, folder: Path, adapters: dict[str, Path]
) -> None:
    """Compiled code counts no calls of modules."""
    require_engine("vllm")
    how = f"lora={adapters['a']},kernels=rlk"
    done = cli(
        "compare", "--model", MODEL, "--contract", "bitwise", "--run-dir", folder / "compiled",
        "--prompts", write_few_prompts(folder / "few.jsonl"), "--production",
        "--rollout", f"vllm:{how}", "--train", f"hf:{how}",
    )  # fmt: skip
    assert done.code == 0, done.out + done.err
    assert done.verdict is not None
    production = done.verdict["edges"]["production_vs_observed"]
    assert production["tokens"] > 80
    assert production["bit_mismatches"] == 0


def test_an_adapter_that_another_function_computes_is_an_error(
    cli: Cli, folder: Path, adapters: dict[str, Path]
) -> None:
    done = cli(
        "capture", "--engine", f"hf:lora={adapters['a']},kernels=rlk,patch=lora_patches:bypassed",
        "--model", MODEL, "--prompts", write_few_prompts(folder / "few.jsonl"),
        "-o", folder / "bypassed", env={"PYTHONPATH": str(PATCHES)},
    )  # fmt: skip
    assert done.code == 3
    assert "the kernels are in place for layers.0.q_proj.lora and were not called" in done.err


Gradients = dict[str, torch.Tensor]


def of_samples(adapters: dict[str, Path], rows: list[int]) -> list[Gradients]:
    """The gradients of A and B, of each row."""
    from rlk_kernels.integrations import hf

    model = adapted(adapters, "b", torch.bfloat16)
    factors = {n: p for n, p in model.named_parameters() if p.requires_grad}
    found = []
    for row in rows:
        loss = -hf.score_tokens(model, IDS[row][None]).sum()
        found.append(
            dict(zip(factors, torch.autograd.grad(loss, list(factors.values())), strict=True))
        )
    return found


def of_fsdp(group: Any, adapters: dict[str, Path]) -> Gradients:
    """Those of the mean over ranks, each of which has a row."""
    from rlk_kernels.integrations import hf
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = adapted(adapters, "b", torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh("cpu", (group.size(),))
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    (-hf.score_tokens(model, IDS[group.rank()][None]).sum()).backward()
    factors = {n: p for n, p in model.named_parameters() if p.requires_grad}
    return {n: p.grad.full_tensor() for n, p in factors.items()}


def test_gradients_repeat_and_are_those_of_fsdp(adapters: dict[str, Path]) -> None:
    one, other = of_samples(adapters, [0, 1])
    assert len(one) == 2 * 4 * 4
    assert all(bool(x.any()) for grads in (one, other) for x in grads.values())
    again = of_samples(adapters, [1, 0])
    for name in one:
        assert torch.equal(again[1][name], one[name])
        assert torch.equal(again[0][name], other[name])
    for grads in on_ranks(2, functools.partial(of_fsdp, adapters=adapters)):
        assert set(grads) == set(one)
        for name, value in grads.items():
            assert torch.equal(value, (one[name].float() + other[name].float()) / 2), name


def test_a_loop_that_trains_an_adapter_has_no_drift(folder: Path) -> None:
    require_engine("vllm")
    root, answers = Path(__file__).resolve().parents[2], folder / "loop.json"
    path = os.pathsep.join(str(root / name) for name in ("", "kernels", "examples/grpo"))
    words = [str(Path(__file__).with_name("grpo_lora.py")), str(folder / "loop"), str(answers)]
    said_by("vllm", words, {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, timeout=500)
    found = json.loads(answers.read_text(encoding="utf-8"))
    for line in found["steps"]:
        assert line["mismatch"]["tokens"] >= 10
        assert line["mismatch"]["other_bits"] == 0
        assert line["gradient_norm"] > 0
        # Of the frozen weights, and of two factors of seven projections in four layers.
        assert line["digests_equal"] == 47 + 2 * 7 * 4
    # A has no gradient while B is zeros.
    first, second = found["changed"]
    assert first == sorted(name for name in second if name.endswith("lora_B"))
    assert len(second) == 2 * 7 * 4
    assert found["with and without"] > 0
    assert found["stale"].startswith(
        "stale weights: layers.0.q_proj.lora_A, layers.0.q_proj.lora_B"
    )
