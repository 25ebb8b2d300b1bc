"""A contract on a terminal: what it allows, and where each number comes from."""

from rich.console import Console

from rlk_align.judge.contract import STATISTICS, Budget, Contract, Limit
from rlk_align.judge.lint import sequence_ess
from rlk_align.text import line


def show_contract(contract: Contract, console: Console) -> None:
    """Prints all that the contract says."""
    console.print(line(f"{contract.id} {contract.version}", "bold"), line(contract.description))
    for name, words in _head(contract).items():
        console.print(line(f"{name:<10}{words}"))
    for limit in contract.limits:
        console.print()
        console.print(line(limit.id, "bold"), line(f"{limit.metric}  {_bound(limit)}"))
        where = [*(limit.edges or ()), *(limit.op_classes or ()), *(limit.sites or ())]
        where += limit.dtypes or ()
        if where:
            console.print(line(f"  where   {', '.join(where)}"))
        if limit.min_tokens:
            console.print(line(f"  needs   {limit.min_tokens:,} sampled tokens"))
        _print_reasons(console, limit.why, limit.source, limit.reason)
    for budget in contract.budgets:
        console.print()
        _print_budget(console, budget)
    for growth in contract.regressions:
        console.print()
        allowed = f"at most {growth.factor:g} times what it was, and {growth.plus:g}"
        console.print(line(growth.id, "bold"), line(f"{growth.metric}  {allowed}"))
        _print_reasons(console, growth.why, growth.source, None)
    for waiver in contract.waivers:
        console.print()
        console.print(line(f"waiver of {waiver.limit}", "bold"))
        console.print(line(f"  {waiver.owner}, until {waiver.expires}: {waiver.reason}"))


def _head(contract: Contract) -> dict[str, str]:
    facts = {"sha256": contract.sha256}
    if contract.extends:
        facts["extends"] = f"{contract.extends.id} {contract.extends.version}"
    noise = "repeats bitwise"
    if contract.max_noise is not None:
        noise = f"noise up to {contract.max_noise:g}"
    facts["needs"] = (
        f"{contract.min_coverage:.0%} of the rows, {contract.min_tokens} tokens; each side {noise}"
    )
    facts["dtypes"] = ", ".join(contract.dtypes)
    if contract.sequences:
        tokens = contract.sequences.tokens
        ess = sequence_ess(contract, tokens)
        facts["sequences"] = (
            f"up to {tokens:,} tokens: at the limits an effective sample size of {ess:.2g} remains"
        )
    return facts


def _bound(limit: Limit) -> str:
    bound = f"fail above {limit.fail:g}"
    if limit.atol is not None:
        bound = f"|a − b| ≤ {limit.atol:g} + {limit.rtol:g} · magnitude"
    if limit.tail is not None:
        shown = ", ".join(f"{limit.fail_at(n):.3g} of {n:,}" for n in (100, 10_000, 1_000_000))
        bound = f"fail above {shown} tokens"
    return bound if limit.warn is None else f"{bound}, warn above {limit.warn:g}"


def _print_budget(console: Console, budget: Budget) -> None:
    console.print(
        line(budget.id, "bold"),
        line(", ".join([*budget.ops, *(f"class {c}" for c in budget.op_classes)])),
    )
    statistics = budget.model_dump(include=set(STATISTICS))
    figures = [
        f"{name} {statistics[name]:g}" for name in STATISTICS if statistics[name] is not None
    ]
    half = (len(figures) + 1) // 2
    console.print(line(f"  rounds  {', '.join(figures[:half])},"))
    console.print(line(f"          {', '.join(figures[half:])}"))
    _print_reasons(console, budget.why, budget.source, budget.reason)


def _print_reasons(console: Console, why: str, source: str, reason: str | None) -> None:
    console.print(line(f"  why     {why}", "dim"))
    console.print(line(f"  source  {source}", "dim"))
    if reason:
        console.print(line(f"  looser  {reason}"))
