"""Compares a small random model of each family in transformers and vLLM, and writes the table of
`docs/families.md`: `python scripts/families_table.py [FAMILY...]`.

What each comparison found is in `reports/engines/families.json`; named families replace their own
entries there.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from command import write_few_prompts  # noqa: E402
from family_models import ALLOWED, IN_VLLM, SETTINGS, family_model  # noqa: E402

from rlk_align.model.families import FAMILIES  # noqa: E402
from rlk_align.model.vision import WHOLES  # noqa: E402

FOUND = ROOT / "reports" / "engines" / "families.json"
PAGE = ROOT / "docs" / "families.md"
EDGE = "prefill_vs_train"
WITHOUT_SDPA = dict.fromkeys(("gemma2", "gpt_oss"), "hf:attn=eager,batch=4")
"""model_type -> the spec of transformers, where its default attention is refused."""
IN_MATRIX = "in the test matrix"
HEAD = """# Families

A model is compared operator by operator if its `model_type` is below.
[Add a family](add-a-family.md) says what a description consists of. A setting of `config.json` that
the description does not cover is refused by name. A model of any other family can be compared
[module by module](modules.md).

`scripts/families_table.py` writes this table. Each cell with a count is one comparison of a small
random checkpoint in bf16, with six prompts and eight new tokens each. The settings of the
checkpoints let each variant change log-probs: windows are shorter than the prompts, ropes differ by
layer, and norms and biases are off their neutral values.

- *Healthy* means that the contract passed, and that each operator of both sides that was recomputed
  in float64 is within its budget. The two counts are the operators that were recomputed and all
  operators. The last number is the mean of the absolute difference of log-probs, in nats.
- *The code of transformers* means that vLLM has no class for the family and runs this code.
- *Refused* means that the tool ends with this reason.
- *In the test matrix* means that tests compare the family there: those of
  `tests/engines/test_family_variants.py`, or pairs of `tests/support/engine_pairs.py`
  ([reports/families.md](../reports/families.md) names some).

In sparse families vLLM on a CPU does not show the rows of each expert. There four operators of a
layer are not recomputed, and the experts' sum is recomputed from the experts' input.

"""


FOOT = """The cells were measured with {packages}; the raw results are in
[families.json](../reports/engines/families.json). Gemma 2 and GPT-OSS are compared with eager
attention in batches of 4, because transformers' sdpa ignores the cap of the one and the sinks of
the other, and is refused. Of Gemma 4, the dense decoder is described: per-layer embeddings, layers
that take the keys and values of another, and experts are refused by the names of their settings.
"""
WITH_IMAGES = """
## Checkpoints that also see images

Prompts are text, so the decoder alone is compared, as the family named here. transformers and vLLM
load it by its own class, with `text_config` of `config.json`, and the part for images is not
loaded. Its log-probs have the bits of the same decoder in a checkpoint of its own.

| `model_type` | `text_config` | class |
| --- | --- | --- |
{rows}

Tensors may be named as published (`language_model.model.layers...`), or as some releases of
transformers save them (`model.language_model.layers...`). Another `text_config` is refused by name,
and so are SGLang and several tensor-parallel ranks of vLLM. Whether the head has the embedding's
weight is what `tie_word_embeddings` says beside `text_config`, not in it, or else the default of
the class for images; a stored head counts in any case. transformers and vLLM do so too. Mistral
publishes its weights in a second form beside these (`consolidated.safetensors`), which vLLM would
prefer; the tool lets it read the form that transformers reads. Small random checkpoints on a CPU
are all that was compared.
"""


def compared(model: Path, folder: Path, rollout: str, train: str, *flags: str) -> dict[str, Any]:
    """What `rlk-align compare` finds."""
    output = folder / "verdict.json"
    output.unlink(missing_ok=True)
    few = write_few_prompts(folder / "few.jsonl")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "rlk_align", "compare", "--model", str(model)),
            *("--prompts", str(few), "--max-new-tokens", "8", "--run-dir", str(folder / "run")),
            *("--rollout", rollout, "--train", train, "--output", f"json={output}", "--fresh"),
            *flags,
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if not output.exists():
        return {"exit_code": done.returncode, "error": done.stderr.strip().splitlines()[-1]}
    verdict = json.loads(output.read_text())
    words = done.stdout.rpartition("on either side: ")[2].split()
    first = verdict["divergences"][EDGE]["first_over_budget"]
    return {
        "exit_code": done.returncode,
        "recomputed": " ".join(words[:3]) if words[1:2] == ["of"] else "",
        "mean_abs_dlogp": verdict["edges"][EDGE]["mean_abs_dlogp"],
        "first_over_budget": first and {"site": first["site"], "side": first["side"]},
        "versions": {r: e["version"] for r, e in verdict["engines"].items()},
        "specs": [rollout, train],
    }


def cell(found: dict[str, Any] | None) -> str:
    """What a cell of the table says of one comparison."""
    if found is None:
        return IN_MATRIX
    if first := found.get("first_over_budget"):
        return f"`{first['site']}` of the {first['side']} side is off: [found](../reports/found.md)"
    if found["exit_code"] == 0:
        return f"healthy, {found['recomputed']}; {found['mean_abs_dlogp']:.2g}"
    return f"exit {found['exit_code']}"


def page(found: dict[str, Any]) -> str:
    """The page of docs for what the comparisons found."""
    lines = [
        "| `model_type` | transformers, eager against sdpa | vLLM on a CPU against transformers | "
        "Megatron-core | the kernels |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name in sorted(FAMILIES):
        of, described = found.get(name, {}), FAMILIES[name]
        alone = {e: f"without the kernels: {why}" for e, why in described.needs_kernels.items()}
        refused = {**described.refused, **alone}
        engines = [
            f"refused: {refused[e]}" if e in refused else IN_MATRIX
            for e in ("vllm", "megatron", "kernels")
        ]
        native = " (the code of transformers)" if FAMILIES[name].backend else ""
        if "vllm" in of:
            engines[0] = cell(of["vllm"]) + native
        cells = [cell(of.get("hf")), *engines]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    runs = [run for of in found.values() for run in of.values() if "versions" in run]
    versions = {
        f"{spec.partition(':')[0]} {run['versions'][role]}"
        for run in runs
        for role, spec in zip(("rollout", "train"), run["specs"], strict=True)
    }
    packages = ", ".join(sorted(versions))
    rows = [
        f"| `{kind}` | `{text}` | `{cls}` |"
        for kind, whole in sorted(WHOLES.items())
        for text, cls in whole.decoders.items()
    ]
    images = WITH_IMAGES.format(rows="\n".join(rows))
    return f"{HEAD}{chr(10).join(lines)}\n\n{FOOT.format(packages=packages)}{images}"


def main(names: list[str]) -> None:
    found = json.loads(FOUND.read_text()) if FOUND.exists() else {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for name in names or sorted(SETTINGS):
            model, train = family_model(folder, name), WITHOUT_SDPA.get(name, "hf")
            found[name] = {
                "hf": compared(model, folder, "hf:attn=eager", train),
            }
            if "vllm" not in {*FAMILIES[name].refused, *FAMILIES[name].needs_kernels}:
                allowed = ALLOWED.get(name, ())
                model = family_model(folder, name, **IN_VLLM.get(name, {}))
                found[name]["vllm"] = compared(model, folder, "vllm", train, *allowed)
            print(name, found[name], flush=True)
            FOUND.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    PAGE.write_text(page(found))


if __name__ == "__main__":
    main(sys.argv[1:])
