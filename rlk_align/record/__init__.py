"""Records both sides of a user's own job as it runs, for `rlk-align compare` afterwards.

    recorder = record.trainer(model, out="records/train")
    for n, prompts in enumerate(batches):
        with recorder.step(n, prompts):
            ...  # the forwards that score log-probs

The rollout side is vLLM or SGLang with RLK_RECORD=FOLDER in its environment:
`rlk_align.record.vllm`, `rlk_align.record.sglang`.
Importing this package imports neither torch nor an engine.

    vllm       the plug-in of vLLM
    sglang     the plug-in of SGLang
    train/     a trainer's step: recorder, recording, segments; its live model: libraries, live,
               and a file for each library; its ranks: rank_attributes, rank_shard, weight_files;
               lasting_writer: what a full disk must not end
    rollout/   a live engine's requests: settings; what it is asked: core; a step: server, window,
               step; taps: live_pass; vllm/ and sglang/: each engine's own part
    shared/    choose: which sequences both sides record; layout, shard: what both sides write;
               together: what ranks say to each other
    merge/     the comparison: align, recorded, history
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlk_align.record.train.recorder import Recorder

__all__ = ["trainer"]


def trainer(
    model: Any,
    out: str,
    *,
    engine: str = "auto",
    checkpoint: str | None = None,
    sequences: int = 8,
    every: int = 50,
    temperature: float = 1.0,
    budget: int = 8_000_000_000,
    weights: bool = True,
) -> "Recorder":
    """A recorder of the forwards of a live trainer. In a job of several ranks, every rank makes it.

    model: a causal LM of transformers, in one process or after FSDP2's `fully_shard`, with PEFT's
    wrapper or without; what `deepspeed.initialize` returned; or a GPTModel of megatron-core, with
    virtual stages the list of a rank's chunks.
    out: the folder of this side's recording, which all ranks can write to. engine: `hf`, `fsdp`,
    `deepspeed`, `megatron`, or `auto`, which sees which of them the model is. checkpoint: for
    `megatron` the folder of the Hugging Face checkpoint that the model was converted from.
    sequences: how many sequences of a step are recorded, of all ranks together. every: steps whose
    number is a multiple of it are recorded. temperature: divides the logits, as the trainer does.
    budget: the bytes of values that a step keeps on a rank; digests of all rows are kept beyond it.
    weights: whether a step also saves the live weights, with which operators are recomputed.

    Raises BadOption for a setting that is unknown or a model that is not recorded, and ToolError if
    another process records into the folder.
    """
    from rlk_align.record.train.libraries import live_model
    from rlk_align.record.train.recorder import Recorder

    live = live_model(model, engine, checkpoint, temperature=temperature, weights=weights)
    return Recorder(live, out, sequences=sequences, every=every, budget=budget)
