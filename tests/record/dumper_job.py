"""SGLang's own dumper, in SGLang and around a transformers model; runs in SGLang's environment.

dumper_job.py rollout FOLDER MODEL [once]   SGLang generates; also from its cache, and with a scaled
                                            weight, unless `once`
dumper_job.py train FOLDER MODEL            the model scores the rollout's ids, also with two faults
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

PROMPTS = [[5, 40, 300, 7, 21, 22], [11, 12, 13]]
NEW_TOKENS = 20


def dump_into(folder: Path, name: str) -> Any:
    """The dumper, which writes to FOLDER/NAME from now on."""
    from sglang.srt.debug_utils.dumper import dumper

    dumper.configure(
        enable=True,
        dir=str(folder),
        exp_name=name,
        non_intrusive_mode="all",
        enable_output_console=False,
    )
    return dumper


def rollout(folder: Path, model: str) -> None:
    import torch
    from sglang_in_process import InProcess

    # SGLang gives its model the dumper's hooks as it loads it.
    dump_into(folder, "loading")
    engine = InProcess(model, dtype="bfloat16", context_length=256)

    def generate(name: str, key: str) -> None:
        dump_into(folder, name)
        answers = engine.generate(PROMPTS, key, NEW_TOKENS)
        said = [
            {"prompt": prompt, "response": answer.tokens, "logprobs": answer.sampled}
            for prompt, answer in zip(PROMPTS, answers, strict=True)
        ]
        (folder / f"{name}.json").write_text(json.dumps(said))

    generate("rollout", "first")
    if "once" in sys.argv:
        return
    generate("cached", "first")
    with torch.no_grad():
        engine.runner.model.model.layers[1].mlp.gate_up_proj.weight.mul_(1.03125)
    dump_into(folder, "scaled").configure(enable_model_value=True)
    dump_into(folder, "scaled").dump_model(engine.runner.model)
    generate("scaled", "second")


def sequences(folder: Path, name: str) -> list[list[int]]:
    """The ids that a generation sampled, with their prompts."""
    return [s["prompt"] + s["response"] for s in json.loads((folder / f"{name}.json").read_text())]


def padded(ids: list[list[int]]) -> tuple[Any, Any]:
    """Ids and the attention mask, padded on the right."""
    import torch

    ones = [torch.ones(len(one), dtype=torch.long) for one in ids]
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(list(map(torch.tensor, ids)), True), pad(ones, True)


def train(folder: Path, model: str) -> None:
    import sglang_stand_ins  # noqa: F401
    import torch
    from transformers import AutoModelForCausalLM

    trainer = AutoModelForCausalLM.from_pretrained(model, dtype="bfloat16").eval()
    dumper = dump_into(folder, "train")
    dumper.register_non_intrusive_dumper(trainer)
    ids = sequences(folder, "rollout")
    batch, mask = padded(ids)
    with torch.no_grad():
        # Two micro-batches of one step.
        trainer(input_ids=batch[:1], attention_mask=mask[:1], use_cache=False)
        trainer(input_ids=batch[1:], attention_mask=mask[1:], use_cache=False)
        dumper.step()
        dump_into(folder, "train-of-scaled")
        other, other_mask = padded(sequences(folder, "scaled"))
        trainer(input_ids=other, attention_mask=other_mask, use_cache=False)
        dumper.step()
        dump_into(folder, "train-scaled")
        projection = trainer.model.layers[1].self_attn.o_proj
        # A hook before the dumper's, which therefore writes what the model goes on with.
        hook = projection.register_forward_hook(lambda _m, _i, out: out * 1.03125, prepend=True)
        trainer(input_ids=batch, attention_mask=mask, use_cache=False)
        dumper.step()
        hook.remove()
        dump_into(folder, "train-crossed")
        packed = torch.tensor([[token for one in ids for token in one]])
        positions = torch.tensor([[p for one in ids for p in range(len(one))]])
        causal = torch.ones(1, 1, packed.shape[1], packed.shape[1], dtype=torch.bool).tril()
        trainer(input_ids=packed, position_ids=positions, attention_mask=causal, use_cache=False)
        dumper.step()


if __name__ == "__main__":
    os.environ["DUMPER_NON_INTRUSIVE_MODE"] = "all"
    {"rollout": rollout, "train": train}[sys.argv[1]](Path(sys.argv[2]), sys.argv[3])
