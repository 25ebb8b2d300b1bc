"""A comparison of two engines on a few prompts, through the command line."""

from pathlib import Path

from command import Outcome, command_line, require_engine, write_few_prompts


def compared(
    folder: Path,
    rollout: str,
    train: str,
    *more: object,
    new_tokens: int = 8,
    env: dict[str, str] | None = None,
) -> Outcome:
    """What `rlk-align compare` says of these specs; the run is `folder / "run"`, and other flags
    are `more`. Skips where an engine is not installed."""
    for engine in (rollout, train):
        require_engine(engine.partition(":")[0])
    return command_line(folder)(
        *("compare", "--prompts", write_few_prompts(folder / "few.jsonl")),
        *("--max-new-tokens", new_tokens, "--run-dir", folder / "run"),
        *("--rollout", rollout, "--train", train, *more),
        env=env,
    )


def named(done: Outcome, edge: str = "prefill_vs_train") -> list[tuple[str, str]]:
    """The operators over their budgets, in execution order, with their sides."""
    assert done.verdict is not None, done.err
    return [(o["site"], o["side"]) for o in done.verdict["divergences"][edge]["over_budget"]]
