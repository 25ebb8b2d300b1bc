"""Runs the real SGLang in this process, with the kernels and without, and writes the bits of its
log-probs.

    python sglang_bits.py JOB.json FOUND.json

torchrun starts it for several ranks.

JOB.json: {"model", "settings" (server arguments), "prompts", "new_tokens", "changed" (a checkpoint
of other weights)}. FOUND.json: "said", by pass, the bits of the log-probs of sampled tokens, a
string for each prompt; "cached", how many tokens of the prompts came from the cache; "retractions",
how often requests lost their slots; "steps", the attention calls of a layer by pass; "named", what
`check` says with a kernel left out; "replaced", the operators; "left", those that a user excluded;
"twice", what a second `use_kernels` says; "restored", whether the model without the kernels is as
it was.
"""

import sglang_in_process  # isort: skip

import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from rlk_kernels.integrations import hf, sglang
from rlk_kernels.integrations.errors import NotSupported
from safetensors.torch import load_file
from sglang.srt.distributed import get_tp_group
from sglang.srt.managers import scheduler as managers
from sglang_stand_ins import RANK, RANKS
from transformers import AutoModelForCausalLM

Answers = list[sglang_in_process.Answer]
Ids = list[list[int]]
Logprobs = list[list[float]]
CHUNK = 16


def bits(rows: Logprobs) -> list[str]:
    values = [torch.tensor(row, dtype=torch.float32) for row in rows]
    assert all(row.isfinite().all() and (row < 0).all() for row in values)
    return [row.numpy().tobytes().hex() for row in values]


class Passes:
    """The passes over one job's prompts. Each has a key of its own, so that no pass reads the keys
    and values that another one cached."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.job, self.prompts, self.new = job, job["prompts"], job["new_tokens"]
        self.engine = sglang_in_process.InProcess(job["model"], **job["settings"])
        self.runner = self.engine.runner
        self.said: dict[str, Logprobs] = {}
        self.steps: dict[str, int] = {}
        self.cached = 0

    def attention_calls(self) -> int:
        return getattr(self.runner.model.model.layers[0].self_attn.attn, "rlk_calls", 0)

    def decode(self, name: str, **more: Any) -> tuple[Ids, Answers]:
        answers = self.engine.generate(self.prompts, name, self.new, **more)
        self.said[name] = [answer.sampled for answer in answers]
        return [answer.tokens for answer in answers], answers

    def score(self, name: str, tokens: Ids, key: str = "", start: Any = 0) -> None:
        """key: of an earlier pass, whose prefixes may come from the cache up to `start`."""
        whole = [a + b for a, b in zip(self.prompts, tokens, strict=True)]
        before = self.attention_calls()
        answers = self.engine.generate(whole, key or name, 1, start=start)
        self.said[name] = [answer.prompt[-self.new :] for answer in answers]
        self.steps[name] = self.attention_calls() - before
        self.cached = sum(answer.cached for answer in answers)

    def hf(self, name: str, tokens: Ids, model: str = "", temperature: float = 1.0) -> None:
        """HF transformers with the kernels."""
        dtype = getattr(torch, self.job["settings"]["dtype"])
        loaded = AutoModelForCausalLM.from_pretrained(model or self.job["model"], dtype=dtype)
        hf.use_kernels(loaded.eval())
        self.said[name] = []
        with torch.no_grad():
            for prompt, answer in zip(self.prompts, tokens, strict=True):
                ids, last = torch.tensor([prompt + answer]), len(answer)
                found = hf.score_tokens(loaded, ids, last=last, temperature=temperature)
                self.said[name].append(found[0].tolist())

    def form(self) -> Any:
        """What the kernels change in the live model."""
        modules = {
            name: (type(m), type(getattr(m, "quant_method", None)), sorted(vars(m)))
            for name, m in self.runner.model.named_modules()
        }
        parts = self.runner.sampler, self.runner.model.logits_processor.input_logprob_processor
        named = [(type(part), sorted(vars(part))) for part in parts]
        return modules, named, id(self.runner.attn_backend)


def refusal(of: Callable[[], Any]) -> str:
    """The error of a call that is not supported."""
    try:
        of()
    except NotSupported as error:
        return str(error)
    return ""


def decode_with_retractions(passes: Passes) -> int:
    """Greedy, while SGLang takes the slots of some requests away every third step and computes
    them again later; how often it did."""
    retract = managers.ScheduleBatch.retract_decode
    with (
        patch.object(managers, "TEST_RETRACT", True),
        patch.object(
            managers.ScheduleBatch, "retract_decode", autospec=True, side_effect=retract
        ) as called,
    ):
        passes.decode("retracted", temperature=0.0)
    return called.call_count


def sums_inside(passes: Passes, tokens: Ids) -> None:
    """Scores while SGLang adds up nothing outside of its modules, as SGLang 0.5.17 does for most of
    them: first with modules that return a rank's part, then with modules that return the sum."""
    layers = passes.runner.model.model.layers
    modules = [getattr(layer.mlp, "down_proj", layer.mlp) for layer in layers]
    modules += [layer.self_attn.o_proj for layer in layers]
    with patch.object(get_tp_group(), "all_reduce", lambda x: x), ExitStack() as inside:
        passes.score("no sums", tokens)
        for module in modules:
            inside.enter_context(patch.object(module, "reduce_results", True))
        passes.score("sums inside", tokens)


def without_a_kernel(passes: Passes, tokens: Ids) -> str:
    """The first layer's activation, or in a sparse model its whole block, gets SGLang's own class
    back; what `check` says. On several ranks the block's weights are not SGLang's."""
    layer = passes.runner.model.model.layers[0]
    sparse = layer.mlp if RANKS == 1 else layer.post_attention_layernorm
    lost = getattr(layer.mlp, "act_fn", sparse)
    ours = type(lost)
    lost.__class__ = ours.__bases__[1]
    passes.score("a kernel left out", tokens)
    said = refusal(lambda: sglang.check(passes.runner))
    lost.__class__ = ours
    return said


def run(job: dict[str, Any]) -> dict[str, Any]:
    passes = Passes(job)
    scheduler, form = passes.engine.scheduler, passes.form()
    stock, _ = passes.decode("stock")
    passes.score("stock prefill", stock)
    passes.hf("hf of stock", stock)
    with sglang.use_kernels(passes.runner):
        tokens, _ = passes.decode("decode")
        passes.score("prefill", tokens)
        usual, scheduler.chunked_prefill_size = scheduler.chunked_prefill_size, CHUNK
        passes.score("chunks", tokens)
        scheduler.chunked_prefill_size = usual
        last = [len(prompt) - 1 for prompt in passes.prompts]
        passes.score("cached prefix", tokens, key="decode", start=last)
        cached = passes.cached
        cool, _ = passes.decode("cool", temperature=0.7)
        greedy, answers = passes.decode("greedy", temperature=0.0, top=2)
        passes.said["top"] = [[values[0] for values in answer.top] for answer in answers]
        sums_inside(passes, tokens)
        retractions = decode_with_retractions(passes)
        replaced = sglang.check(passes.runner).replaced
        twice = refusal(lambda: sglang.use_kernels(passes.runner))
        named = without_a_kernel(passes, tokens)
    excluded = ["mlp_norm", "logprob"]
    with sglang.use_kernels(passes.runner, excluded):
        passes.score("excluded", tokens)
        left = sglang.check(passes.runner).not_replaced
    restored = passes.form() == form
    passes.decode("stock again")
    passes.hf("hf", tokens)
    passes.hf("hf of cool", cool, temperature=0.7)
    passes.hf("hf of greedy", greedy)
    with sglang.use_kernels(passes.runner):
        weights = load_file(Path(job["changed"]) / "model.safetensors")
        done, why = passes.runner.weight_updater.update_weights_from_tensor(list(weights.items()))
        assert done, why
        updated, _ = passes.decode("updated")
        passes.score("updated prefill", updated)
        passes.score("updated, old tokens", tokens)
        done, why = passes.runner.weight_updater.update_weights_from_disk(job["model"], "auto")
        assert done, why
        passes.score("from disk", tokens)
    passes.hf("hf of updated", updated, job["changed"])
    return {
        "said": {name: bits(rows) for name, rows in passes.said.items()},
        **{"cached": cached, "retractions": retractions, "steps": passes.steps, "named": named},
        **{"replaced": replaced, "twice": twice, "left": left, "restored": restored},
    }


if __name__ == "__main__":
    asked, found = map(Path, sys.argv[1:])
    bits_found = run(json.loads(asked.read_text()))
    if RANK == 0:
        found.write_text(json.dumps(bits_found))
