"""vLLM on several GPUs against one: with the kernels every bit is the same, and what it costs.

    python kernels/bench/tensor_parallel.py [--tp 2] [--layers 12] [--out reports/bench/tp.json]

Needs as many GPUs as --tp says, vLLM, transformers, and the kernels installed as its plugin. Makes
a checkpoint of random weights in the shape of Qwen3-8B, of --layers layers, and runs `serving.py`
for each engine by itself: tokens a second, and a digest of greedy tokens and their log-probs. Fails
where the kernels' digest at --tp is not that of one GPU.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SHAPE = {
    "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "head_dim": 128,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 40960,
    "tie_word_embeddings": False, "initializer_range": 0.02,
}  # fmt: skip
BATCHES = "decode:1x1024,decode:16x1024,decode:64x1024,prefill:16x1024"


def write_checkpoint(folder: Path, layers: int) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model("qwen3", num_hidden_layers=layers, **SHAPE)
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)


def measured(model: Path, engine: str, tp: int) -> dict[str, Any]:
    """What `serving.py` says: the digest, and the median rate of each batch."""
    out = model / f"{engine}-{tp}.jsonl"
    script = Path(__file__).with_name("serving.py")
    subprocess.run(
        [
            *(sys.executable, str(script), "--model", str(model), "--engine", engine),
            *("--tp", str(tp), "--load-format", "auto", "--out", str(out), "--batches", BATCHES),
            *("--lock", str(model / "lock")),
        ],
        check=True,
    )
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    rates = {
        f"{line['what']}:{line['batch']}x{line['length']}": statistics.median(line["rates"])
        for line in lines
        if "rates" in line
    }
    (digest,) = (line["digest"] for line in lines if line["what"] == "bits")
    return {"engine": engine, "tp": tp, "digest": digest, "rates": rates}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--write", type=Path, help="only write the checkpoint, to this folder")
    args = parser.parse_args()
    if args.write:
        write_checkpoint(args.write, args.layers)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        # A process of its own: it would keep memory of the GPU.
        making = (sys.executable, __file__, "--layers", str(args.layers), "--write", folder)
        subprocess.run(making, check=True)
        runs = [
            measured(Path(folder), engine, tp) for engine in ("rlk", "own") for tp in (1, args.tp)
        ]
    if args.out:
        args.out.write_text(json.dumps(runs, indent=1) + "\n")
    for run in runs:
        rates = "  ".join(f"{what} {rate:,.0f}/s" for what, rate in run["rates"].items())
        print(f"{run['engine']} tp={run['tp']}  {run['digest']}  {rates}")
    of_rlk = {run["digest"] for run in runs if run["engine"] == "rlk"}
    print("the kernels' bits are " + ("equal" if len(of_rlk) == 1 else "NOT equal"))
    return len(of_rlk) - 1


if __name__ == "__main__":
    sys.exit(main())
