"""What observing costs, and what the parent needs: a 30 M parameter random model, 64 x 512 tokens.

    python scripts/bench_capture.py [--sequences 64] [--out reports/capture]

Compares HF eager with HF sdpa, which differ from layer 0 on, so that nearly every value is read;
in processes as a user would start them. Writes OUT.json and OUT.md: wall time of each pass with
taps and without, bytes of trace, and the parent's peak memory (ru_maxrss of the `rlk-align`
process itself, workers not included).
"""

import argparse
import json
import platform
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from rlk_align.data import data_path

PROMPT_TOKENS, NEW_TOKENS = 480, 32
ENGINES = ("hf:attn=eager", "hf:attn=sdpa")


def make_model(folder: Path) -> int:
    """A random Qwen3-shaped model with about 30 M parameters; returns their number."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=None,
    )
    model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(data_path("model") / name, folder / name)
    return sum(p.numel() for p in model.parameters())


def run(model: Path, prompts: Path, folder: Path) -> int:
    """`rlk-align compare` of the two engines; returns the parent's peak memory in bytes."""
    measured = (
        "import resource, sys\n"
        "from rlk_align.cli.main import main\n"
        "try: main()\n"
        "finally:\n"
        "    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "    print('peak', peak, file=sys.stderr)"
    )
    words = ["compare", "--model", model, "--prompts", prompts, "--run-dir", folder]
    words += ["--rollout", ENGINES[0], "--train", ENGINES[1], "--edges", "prefill_vs_train"]
    words += ["--max-new-tokens", NEW_TOKENS]
    done = subprocess.run(
        [sys.executable, "-c", measured, *map(str, words)], stderr=subprocess.PIPE, text=True
    )
    print(done.stderr, file=sys.stderr)
    if done.returncode not in (0, 1):
        sys.exit(done.returncode)
    peak = next(line for line in done.stderr.splitlines() if line.startswith("peak "))
    return int(peak.split()[1]) * 1024


def passes(folder: Path) -> list[dict]:
    """Of each pass: seconds, and bytes on disk."""
    found = []
    for path in sorted(folder.glob("captures/*/*/pass.json")):
        record = json.loads(path.read_text())
        found.append(
            {
                "capture": path.parent.parent.name.split("-")[0],
                "pass": path.parent.name,
                "seconds": round(record["seconds"], 2),
                "bytes": sum(f["size"] for f in record["files"].values()),
            }
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--out", type=Path, default=Path("reports/capture"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        parameters = make_model(work / "model")
        rng = random.Random(0)
        prompts = work / "prompts.jsonl"
        rows = [[rng.randrange(8192) for _ in range(PROMPT_TOKENS)] for _ in range(args.sequences)]
        prompts.write_text("".join(json.dumps({"ids": ids}) + "\n" for ids in rows))
        peak = run(work / "model", prompts, work / "run")
        result = {
            "command": f"python scripts/bench_capture.py --sequences {args.sequences}",
            "engines": ENGINES,
            "machine": f"{platform.machine()}, {torch.get_num_threads()} threads,"
            f" {torch.backends.cpu.get_cpu_capability()}",
            "versions": f"python {platform.python_version()}, torch {torch.__version__}",
            "parameters": parameters,
            "tokens": args.sequences * (PROMPT_TOKENS + NEW_TOKENS),
            "parent_peak_bytes": peak,
            "passes": passes(work / "run"),
        }
    args.out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    args.out.with_suffix(".md").write_text(table(result))
    print(table(result))


def table(r: dict) -> str:
    lines = [
        "# What observing costs",
        "",
        f"{r['parameters'] / 1e6:.1f} M parameters (random, bf16), {r['tokens']:,} tokens; "
        f"{r['engines'][0]} against {r['engines'][1]}; {r['machine']}; {r['versions']}.",
        "",
        f"`{r['command']}`. Peak memory of the parent process: "
        f"{r['parent_peak_bytes'] / 1e6:.0f} MB.",
        "",
        "| capture | pass | seconds | over untapped | trace |",
        "| --- | --- | ---: | ---: | ---: |",
    ]
    plain = {(p["capture"], p["pass"]): p["seconds"] for p in r["passes"]}
    for p in r["passes"]:
        kind, _, variant = p["pass"].partition(".")
        base = plain.get((p["capture"], f"{kind}.untapped"))
        ratio = f"{p['seconds'] / base:.2f} ×" if base and variant != "untapped" else ""
        lines.append(
            f"| {p['capture']} | {p['pass']} | {p['seconds']:.1f} | {ratio} | "
            f"{p['bytes'] / 1e6:,.0f} MB |"
        )
    lines += [
        "",
        "`untapped` runs without a hook; `repeat` observes every site and keeps digests; the "
        "plain pass also keeps statistics and values and writes them while it runs.",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
