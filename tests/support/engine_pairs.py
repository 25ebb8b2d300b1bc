"""The matrix of engine pairs: the models, the layouts of each engine, and the pairs that tests run.

A new layout is an entry of `ENGINES` or `ROLLOUTS`; a new engine has one in `FACTS` too. The models
are in `pair_models`.
`tests/fix_path/test_pairs.py` runs every pair of `WHOLE` that has the kernels, and
`tests/real_runs/test_healthy_pairs.py` every other one. Without the marker `whole_matrix` they run
those of `DEFAULT`, in which every two values of the axes meet. RLK_PAIRS=FILE.jsonl collects what
each comparison found, for the reports.
"""

import json
import os
from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from command import Cli, Outcome, capture_of, require_engine, spec_here, write_few_prompts
from covering import covering
from pair_models import MODELS, STRETCHED_FROM, Model
from rlk_kernels.integrations.vllm.families import ONE_RANK

from rlk_align.model.edges import EDGES


@dataclass(frozen=True)
class Layouts:
    """The options by which an engine lays out rows and ranks."""

    few: tuple[str, ...]
    """For every model."""
    few_dense: tuple[str, ...] = ()
    """For every dense model."""
    few_sparse: tuple[str, ...] = ()
    """For every sparse model."""
    dense: tuple[str, ...] = ()
    sparse: tuple[str, ...] = ()
    """For the models that have every layout."""

    def of(self, model: Model) -> tuple[str, ...]:
        few = (*self.few, *(self.few_sparse if model.sparse else self.few_dense))
        more = self.sparse if model.sparse else self.dense
        return (*few, *more) if model.every_layout else few


@dataclass(frozen=True)
class Facts:
    """What is known of an engine's own kernels."""

    numbers: str
    """Engines with the same name here compute the same numbers."""
    other_rounding: frozenset[str] = frozenset()
    """Operators that may introduce a difference from vLLM in the embedded model."""
    hidden: frozenset[str] = frozenset()
    """Operators of experts that it computes in one kernel, so that no row can be paired."""
    together: frozenset[str] = frozenset()
    """Operators that are excluded from the kernels with another one, because the engine computes
    both by one product or one function."""
    alike: frozenset[str] = frozenset()
    """Operators that it computes as the kernels' profile says anyway."""


_ROUNDING = {"q_rope", "k_rope", "attn", "mlp_norm", "attn_norm", "q_norm", "k_norm", "o_proj"}
# HF rounds every operation of a rotation, and vLLM rotates in fp32 and rounds once; vLLM's norms
# multiply by the weight before they round; sums of attention and of products have other orders.
_TORCH = Facts(
    numbers="torch",
    other_rounding=frozenset(_ROUNDING),
    together=frozenset({"k_rope"}),
    alike=frozenset({"embed"}),
)
FACTS = {
    "hf": _TORCH,
    "fsdp": _TORCH,
    "deepspeed": _TORCH,
    "megatron": Facts(
        numbers="megatron",
        # torch's norm rounds once, the fp32 sums of vLLM and Megatron have other orders, and a
        # row-parallel product adds rounded halves.
        other_rounding=frozenset(_ROUNDING),
        hidden=frozenset({"act", "down_proj"}),
        together=frozenset({"k_proj", "v_proj", "up_proj", "k_rope"}),
        alike=frozenset({"embed"}),
    ),
    "vllm": Facts(
        numbers="vllm",
        hidden=frozenset({"gate_proj", "up_proj", "act", "down_proj"}),
        together=frozenset({"k_proj", "v_proj", "up_proj", "k_rope"}),
        # A copy, and on CPUs the rotation.
        alike=frozenset({"embed", "q_rope"}),
    ),
    "sglang": Facts(
        numbers="sglang",
        other_rounding=frozenset(_ROUNDING),
        hidden=frozenset({"gate_proj", "up_proj", "act", "down_proj"}),
    ),
}
_SGLANG_MORE = ("chunked_prefill_size=32", "radix_cache=1", "tp=4")
_SGLANG = Layouts(
    ("", "tp=2", "chunked_prefill_size=32,page_size=16,max_running_requests=3,radix_cache=1"),
    few_sparse=_SGLANG_MORE,
    dense=_SGLANG_MORE,
)
ENGINES = {
    "hf": Layouts(("", "batch=4,padding=left"), dense=("batch=4,padding=right", "batch=1")),
    "fsdp": Layouts(("dp=2",), dense=("dp=1", "dp=4")),
    "deepspeed": Layouts(
        ("dp=2",),
        dense=(
            "checkpointing=1",
            *(
                ",".join(filter(None, (f"stage={stage}", dp, mixed)))
                for mixed in ("", "mixed=autocast")
                for dp in ("", "dp=2")
                for stage in range(4)
                if (stage, dp, mixed) != (3, "dp=2", "")
            ),
        ),
    ),
    "megatron": Layouts(
        ("", "input=packed"),
        few_dense=("tp=2",),
        dense=(
            *("batch=1", "batch=4,padding=left", "batch=4,padding=right"),
            *("tp=2,sp=1", "tp=4", "tp=4,sp=1", "tp=4,sp=1,input=packed"),
            *("tp=2,batch=4,padding=left", "cp=2", "cp=4,input=packed"),
            *("tp=2,cp=2,sp=1", "tp=2,cp=2,sp=1,input=packed", "tp=2,pp=2,sp=1"),
            *("pp=2", "cp=2,pp=2", "cp=2,pp=2,batch=1", "pp=4"),
        ),
        sparse=(
            *("dispatcher=alltoall,batch=4", "ep=2", "ep=2,dispatcher=alltoall"),
            *("ep=2,batch=4,padding=left", "ep=4,pp=2,input=packed"),
            *("cp=2,ep=2,dispatcher=alltoall", "cp=2,pp=4"),
        ),
    ),
    "vllm": Layouts(
        ("", "max_num_seqs=2,max_num_batched_tokens=64,enable_prefix_caching=1"),
        dense=(
            "max_num_seqs=1,block_size=128",
            *("max_num_seqs=3,max_num_batched_tokens=64", "enable_prefix_caching=1"),
        ),
    ),
    "sglang": _SGLANG,
}
"""What scores: engine -> its layouts."""
ROLLOUTS = {
    "vllm": Layouts(("", "tp=2"), dense=("tp=4",), sparse=("tp=4",)),
    "hf": Layouts(("",)),
    "sglang": _SGLANG,
}
"""What samples: engine -> its layouts."""
ALSO = {
    "llama": ("hf:batch=1",),
    "qwen3": ("hf:batch=4,padding=right",),
    "mistral": ("megatron:batch=4,padding=right", "vllm:max_num_seqs=1,block_size=128"),
    "mixtral": ("vllm:max_num_seqs=3,max_num_batched_tokens=64",),
    "phi3": ("deepspeed:checkpointing=1",),
    "ernie4_5": ("deepspeed:stage=1,dp=2,mixed=autocast",),
    "gemma2": ("deepspeed:stage=2,dp=2,mixed=autocast",),
    "exaone4": ("fsdp:dp=1",),
    "deepseek_v3": ("megatron:ep=2",),
    "olmo3": ("fsdp:dp=4",),
    "odd-sizes": ("deepspeed:stage=3,dp=2,mixed=autocast",),
}
"""Layouts that a model has beside `few`, so that one of the default pairs shows both."""


@dataclass(frozen=True)
class Pair:
    """A model in two engines: one point of the matrix."""

    model: str
    dtype: str
    kernels: str
    rollout: str
    train: str

    @property
    def id(self) -> str:
        return "-".join((self.kernels, self.model, self.dtype, self.rollout, self.train))

    @property
    def engines(self) -> tuple[str, str]:
        return self.rollout.partition(":")[0], self.train.partition(":")[0]

    @property
    def drifts(self) -> bool:
        """Whether the engines' own kernels compute other numbers."""
        rollout, train = (FACTS[engine].numbers for engine in self.engines)
        return rollout != train or self.autocast

    @property
    def autocast(self) -> bool:
        """Whether the trainer keeps its residual stream and its norms in fp32."""
        return "mixed=autocast" in self.train

    @cached_property
    def goals(self) -> frozenset[Hashable]:
        """The combinations that this pair reaches, of two axes each.

        Every two values of these axes meet: family, dtype, kernels, rollout engine, training
        engine and its ranks; of the training engines that run the code of transformers, one meets
        a family. With the kernels, every two options of a training engine's layout meet, each
        model without `as_in` and `rarely` is in vLLM and in another engine, and several ranks of
        the rollout meet dense and sparse models, those that add residuals outside of norms, each
        dtype and each training engine. Without the kernels, every dense family meets HF and
        Megatron. SGLang, which starts slowly, samples once on two ranks, with the kernels and a
        sparse model, and scores once, on one rank without them.
        """
        rollout, train = self.engines
        model = MODELS[self.model]
        if "sglang" in self.engines:
            if self.kernels == "rlk" and model.sparse and self.rollout == "sglang:tp=2":
                return frozenset({("sglang", "rlk"), ("model", self.model)})
            scores = (self.kernels, self.train) == ("off", "sglang")
            return frozenset({("sglang", "off")} if scores else ())
        axes = {
            "dtype": self.dtype,
            "kernels": self.kernels,
            "rollout": rollout,
            "engine": train,
            "ranks": any(option in self.train for option in ("dp=", "tp=", "cp=", "pp=", "ep=")),
        }
        reached: set[Hashable] = set(combinations(axes.items(), 2))
        of_family = axes | {"engine": FACTS[train].numbers}
        reached |= {(model.like or model.family, axis) for axis in of_family.items()}
        if self.kernels == "rlk":
            options = [(train, option) for option in self.train.partition(":")[2].split(",")]
            reached |= {*options, *combinations(options, 2)}
            if "vllm" in self.engines and rollout != train:
                reached |= set() if model.as_in or model.rarely else {("model", self.model)}
        elif not model.sparse and train in ("hf", "megatron"):
            reached.add((model.family, model.kernels, train))
        if "tp=" in self.rollout:
            reached.add(("ranks of the rollout", model.sparse, model.adds_outside_norms))
        return frozenset(reached)

    def run(self, cli: Cli, folder: Path, prompts: Path) -> Outcome:
        """What `rlk-align compare` says of the pair; the run is `folder / "run"`. Skips where an
        engine is not installed."""
        for engine in self.engines:
            require_engine(engine)
        more = f"dtype={self.dtype},kernels={self.kernels}"
        rollout, train = (
            spec_here(f"{spec}{',' if ':' in spec else ':'}{more}")
            for spec in (self.rollout, self.train)
        )
        contract = ("--contract", "bitwise") if self.kernels == "rlk" else ()
        done = cli(
            *("compare", "--model", MODELS[self.model].stored(folder, self.model, self.dtype)),
            *("--prompts", prompts, "--max-new-tokens", 8),
            *("--rollout", rollout, "--train", train, "--run-dir", folder / "run", *contract),
        )
        record = os.environ.get("RLK_PAIRS")
        if record and done.verdict:
            with Path(record).open("a") as file:
                said = {name: done.verdict[name] for name in ("edges", "coverage")}
                file.write(json.dumps({"pair": self.id, "first": done.first} | said) + "\n")
        return done

    def compared(self, cli: Cli, folder: Path) -> Outcome:
        """What `run` says of a few prompts, after what holds for every healthy pair."""
        done = self.run(cli, folder, write_few_prompts(folder / "few.jsonl"))
        assert done.code == 0, done.out + done.err
        verdict = done.verdict
        assert verdict is not None
        assert verdict["dtype"] == self.dtype
        assert verdict["precheck"]["mismatches"] == verdict["breaches"] == []
        assert verdict["controls"]["observer"] == "bitwise"
        assert verdict["controls"]["noise_floor"] == {"rollout": "bitwise", "train": "bitwise"}
        assert set(verdict["edges"]) == set(EDGES)
        assert all(edge["tokens"] == verdict["tokens"] > 40 for edge in verdict["edges"].values())
        samples = capture_of(folder / "run", "rollout").tokens.samples
        assert max(len(sample.ids) for sample in samples) > 3 * STRETCHED_FROM
        kernels = {"torch"} if self.kernels == "rlk" else set()
        for role in ("rollout", "train"):
            assert set(capture_of(folder / "run", role).record.kernels.values()) == kernels
        return done


def _specs(engines: dict[str, Layouts], model: Model) -> list[str]:
    return [
        f"{name}:{options}" if options else name
        for name, layouts in engines.items()
        if name not in model.without and (name != "sglang" or model.sglang)
        for options in layouts.of(model)
    ]


_FIRST = {f"{name}:{layouts.few[0]}".rstrip(":") for name, layouts in ENGINES.items()}


def _meets_sglang(rollout: str, train: str) -> bool:
    """SGLang meets the first layout of each engine, of its own too."""
    others = [spec for spec in (rollout, train) if not spec.startswith("sglang")]
    return len(others) == 2 or (others or [train])[0] in _FIRST


_EVERY = [
    Pair(name, dtype, kernels, rollout, train)
    for name, model in MODELS.items()
    for dtype in model.dtypes
    for kernels in model.kernels
    for rollout in _specs(ROLLOUTS, model)
    for train in (*_specs(ENGINES, model), *ALSO.get(name, ()))
    if _meets_sglang(rollout, train)
    # Without the kernels, only one rank of vLLM samples.
    if kernels == "rlk" or not rollout.startswith("vllm:")
    if not (model.family in ONE_RANK and "tp=" in rollout)
    # With the kernels, HF refuses a cache that is cut to a window, and that of a gated delta net.
    if kernels == "off"
    or rollout != "hf"
    or {"sliding_window", "linear_key_head_dim"}.isdisjoint(model.settings)
    # Autocast is for bf16.
    if dtype == "bfloat16" or "autocast" not in train
    # HF samples for a few layouts.
    if rollout != "hf" or "," not in train
]
WHOLE = {pair.id: pair for pair in _EVERY}
_CACHED = "sglang:max_running_requests=2,radix_cache=1,page_size="
CACHED = {
    pair.id: pair
    for pair in (
        Pair(model, dtype, kernels, f"{_CACHED}{page}", train)
        for model in ("embedded", "untied")
        for dtype in MODELS[model].dtypes
        for kernels in MODELS[model].kernels
        for page in (1, 16)
        for train in ("hf", "fsdp:dp=2", "megatron", "vllm")
        if kernels == "rlk" or train == "hf"
    )
}
"""Pairs for prompts that begin alike, so that SGLang takes rows from its cache."""
DEFAULT = {pair.id for pair in covering(_EVERY, lambda pair: pair.goals, rarest=True)}


def cases(kernels: str) -> list[Any]:
    """The names of the pairs with the kernels (`rlk`) or without (`off`), for `parametrize`."""
    return [
        # pytest names a long value by its number, unless it has the id.
        pytest.param(name, id=name, marks=() if name in DEFAULT else pytest.mark.whole_matrix)
        for name, pair in WHOLE.items()
        if pair.kernels == kernels
    ]
