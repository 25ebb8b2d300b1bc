"""Runs the loop several times at once: with the kernels and without, for each seed, on one or more
GPUs.

    python examples/grpo/runs.py --out runs/six --cards 0,1 --seconds 540 -- \\
        --model runs/model --steps 300 --eval-every 50 --held-out 256 --turns 1 --no-sleep

The runs share the GPUs evenly. After --seconds, each run is stopped and saves its state; the same
command with --resume continues, and starts the runs that were not saved. The options after `--` are
those of train.py. At the end the script prints a summary and draws a chart.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from record import STATE
from summary import summary

HERE = Path(__file__).resolve().parent
STAGGER, REPORT_EVERY, TO_SAVE = 2, 20, 90
"""Seconds between two starts, between two reports of progress, and for saving."""


def arguments() -> argparse.Namespace:
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    a.add_argument("--out", type=Path, required=True, help="folder of the runs")
    a.add_argument("--cards", default="0", help="numbers of the GPUs, separated by commas")
    a.add_argument("--seeds", default="0,1,2")
    a.add_argument("--kernels", default="rlk,off")
    a.add_argument("--seconds", type=float, default=3600, help="until the runs are stopped")
    a.add_argument("--resume", action="store_true")
    a.add_argument("train", nargs="*", help="options of train.py")
    return a.parse_args()


def start(o: argparse.Namespace, name: str, card: str, words: list[str]) -> subprocess.Popen:
    """Starts train.py on a GPU; its output goes to NAME.log."""
    variables = os.environ | {"CUDA_VISIBLE_DEVICES": card}
    variables.setdefault("OMP_NUM_THREADS", "4")
    command = [sys.executable, str(HERE / "train.py"), "--run", str(o.out / name), *words]
    with (o.out / f"{name}.log").open("a") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=variables)


def last_line(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return lines[-1][-110:] if lines else "–"


def wait(o: argparse.Namespace, runs: dict[str, subprocess.Popen], end: float) -> None:
    """Waits until all runs have ended, and stops them at the time `end`."""
    reported, stopping = time.monotonic(), False
    while any(run.poll() is None for run in runs.values()):
        now = time.monotonic()
        if now > end and not stopping:
            stopping = True
            for run in runs.values():
                run.send_signal(signal.SIGINT)
        if now > end + TO_SAVE:
            for run in runs.values():
                run.kill()
        if now - reported > REPORT_EVERY:
            reported = now
            for name in runs:
                print(f"{name}: {last_line(o.out / f'{name}.log')}", flush=True)
        time.sleep(0.5)


def main() -> int:
    o, begun = arguments(), time.monotonic()
    o.out.mkdir(parents=True, exist_ok=True)
    cards = o.cards.split(",")
    runs: dict[str, subprocess.Popen] = {}
    for number, seed in enumerate(o.seeds.split(",")):
        # The order alternates, so that each GPU gets runs with and without the kernels.
        kernels = o.kernels.split(",")
        for which in kernels if number % 2 == 0 else reversed(kernels):
            name, card = f"{which}-{seed}", cards[len(runs) % len(cards)]
            words = [*o.train, "--kernels", which, "--seed", seed]
            if o.resume and (o.out / name / STATE).exists():
                words.append("--resume")
            runs[name] = start(o, name, card, words)
            time.sleep(STAGGER)
    try:
        wait(o, runs, begun + o.seconds)
    finally:
        for run in runs.values():
            run.kill()
    for name, run in runs.items():
        print(f"{name}: exit code {run.wait()}, {last_line(o.out / f'{name}.log')}")
    print(summary([o.out / name for name in runs]), flush=True)
    chart = [sys.executable, str(HERE / "chart.py"), *(str(o.out / name) for name in runs)]
    subprocess.run([*chart, "-o", str(o.out / "chart.svg")], check=False)
    return int(any(run.returncode not in (0, 130) for run in runs.values()))


if __name__ == "__main__":
    sys.exit(main())
