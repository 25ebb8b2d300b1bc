"""The trainer's half of a loop whose rollouts come from a server.

trainer_loop.py FOLDER MODEL STEPS.json [BROKEN]

STEPS: step -> pairs of prompt and response. From step BROKEN on, an operator is not what it was.
"""

import json
import sys
from pathlib import Path


def main(folder: str, model: str, steps: str, broken: str = "") -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from rlk_align import record

    trainer = AutoModelForCausalLM.from_pretrained(model, dtype="bfloat16")
    recorder = record.trainer(trainer, folder, every=1)
    for name, pairs in json.loads(Path(steps).read_text()).items():
        if name == broken:
            up_proj = trainer.model.layers[1].mlp.up_proj
            up_proj.register_forward_hook(lambda _module, _inputs, output: output * 1.03125)
        with recorder.step(int(name), [prompt for prompt, _ in pairs]), torch.no_grad():
            for prompt, response in pairs:
                trainer(torch.tensor([prompt + response]), use_cache=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
