"""Each guard of a verdict is taken out in turn, and its witness must notice.

A copy of the package is changed in one expression or statement, which is found by its syntax, and
the one test that watches over it is run against the copy.
"""

import ast
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
from command import ended

import rlk_align

ROOT = Path(__file__).parent.parent.parent


class Guard(NamedTuple):
    where: str
    """A module, or `module::function` where the module holds the same code elsewhere too."""
    code: str
    """An expression or a statement, however it is laid out in the module."""
    without: str
    """What stands in its place in the changed copy."""
    witness: str


_REFEREE = "probe/referee/test_referee.py"

GUARDS = {
    "precheck stops": Guard(
        "compare/measure.py",
        *("all(m.kind in allowed or not m.stops for m in mismatches)", "True"),
        "compare/test_measure.py::test_a_mismatch_stops_it_before_any_number",
    ),
    "precheck is inconclusive": Guard(
        *("results.py", "bool(self.stopping)", "False"),
        "judge/test_verdict.py::test_a_failed_precheck_stops_everything",
    ),
    "observer": Guard(
        *("judge/verdict.py", 'c.controls.observer in ("violated", "not measured")', "False"),
        "judge/test_verdict.py::test_a_violated_observer_is_inconclusive",
    ),
    "coverage": Guard(
        "judge/verdict.py",
        *("not paired >= contract.min_coverage * expected or not paired", "False"),
        "judge/test_verdict.py::test_low_coverage_is_inconclusive",
    ),
    "too few tokens": Guard(
        *("judge/verdict.py", "not edge.metrics.tokens >= contract.min_tokens", "False"),
        "judge/test_verdict.py::test_too_few_tokens_are_inconclusive",
    ),
    "missing rows": Guard(
        *("judge/verdict.py", "not explained", "False"),
        "judge/test_verdict.py::test_one_unexplained_row_is_inconclusive",
    ),
    "NaN in a metric": Guard(
        *("judge/checks.py", "self.size <= self.fail", "not self.size > self.fail"),
        "judge/test_verdict.py::test_nan_and_inf_fail_every_limit",
    ),
    "NaN in a row": Guard(
        "judge/checks.py",
        'yield _of_site(site, edge, limit="finite", metric="nonfinite", value=value, fail=0.0)',
        "None",
        "judge/test_verdict.py::test_a_nonfinite_entry_fails_any_contract",
    ),
    "a side that does not repeat itself": Guard(
        *("judge/verdict.py", "_noise(c, contract)", "list[str]()"),
        "judge/test_verdict.py::test_a_side_that_does_not_repeat_itself_is_named_whatever_was_measured",
    ),
    "a side that was imported": Guard(
        *("judge/verdict.py::doubts_of", "c.not_recorded.items()", "list[tuple[str, list[str]]]()"),
        "judge/test_verdict.py::test_a_side_that_was_imported_is_a_doubt",
    ),
    "taps within the noise": Guard(
        *("compare/controls.py", "not shift.max() <= _MAX_OVER_NOISE * noise.max()", "False"),
        "compare/test_measure.py::test_taps_beyond_the_noise_are_a_violation",
    ),
    "taps that move most tokens": Guard(
        "compare/controls.py",
        "larger <= max(_SHARE * tokens, tokens / 2 + _DEVIATIONS * math.sqrt(tokens) / 2)",
        "True",
        "compare/test_measure.py::test_two_draws_of_a_noise_are_told_from_a_shift_of_most_tokens",
    ),
    "a limit for more tokens": Guard(
        "judge/verdict.py",
        *("not any(applies(x, edge, judged, contract) for x in limits)", "not limits"),
        "judge/test_verdict.py::test_a_limit_that_wants_more_tokens_is_told_and_proves_nothing",
    ),
    "an inconclusive run of two": Guard(
        *("judge/regression.py", "doubts_of(run, contract)", "()"),
        "judge/test_regression.py::test_of_an_inconclusive_run_nothing_is_concluded",
    ),
    "operators that only one of two runs has": Guard(
        *("judge/regression.py::_check_alike", "old != new", "len(old) != len(new)"),
        "judge/test_regression.py::test_runs_that_cannot_be_compared",
    ),
    "an expired waiver": Guard(
        *("judge/verdict.py", 'any(u.state == "expired" for u in uses)', "False"),
        "judge/test_limits.py::test_an_expired_waiver_fails_even_where_nothing_is_wrong",
    ),
    "a NaN that is waived": Guard(
        *("judge/waivers.py", 'check.metric != "nonfinite"', "True"),
        "judge/test_limits.py::test_a_waiver_covers_what_it_names_and_no_nan",
    ),
    "an operator without a limit": Guard(
        *("judge/checks.py", "contract.uncovered(limits, operators)", "()"),
        "judge/test_limits.py::test_an_operator_that_no_limit_speaks_of_is_an_error",
    ),
    "an operator without a budget": Guard(
        *("judge/contract.py", "self.budget(op, op_class) is None", "False"),
        "judge/test_budgets.py::test_a_model_with_an_operator_of_no_budget_is_not_judged",
    ),
    "the budget of a class": Guard(
        *("judge/contract.py", "op_class in budget.op_classes", "False"),
        "judge/test_budgets.py::test_a_new_operator_is_held_to_the_budget_of_its_class",
    ),
    "a looser limit without a reason": Guard(
        *("judge/load.py", "not reasons.get(change.entry, contract.extends.reason)", "False"),
        "judge/test_changes.py::test_loosening_wants_a_reason",
    ),
    "the hash of a parent": Guard(
        *("judge/load.py", '("id", "version", "sha256")', '("id", "version")'),
        "judge/test_changes.py::test_the_parent_is_pinned",
    ),
    "contents of a file": Guard(
        *("trace/checksums.py", "digest != files[name].blake2b", "False"),
        "trace/test_run.py::test_a_capture_that_was_made_again_is_another",
    ),
    "a file that is not named": Guard(
        "trace/checksums.py::check",
        *("list(names)", "[name for name in names if name in self.files]"),
        "trace/test_trace.py::test_a_file_that_no_checksum_names_is_not_read",
    ),
    "a capture that was changed": Guard(
        *("trace/schema.py", "check_files(folder / name, record.files)", "None"),
        "cli/test_outputs.py::test_a_capture_that_is_there_is_compared_whole",
    ),
    "a stale verdict": Guard(
        *("pipeline.py", "run.invalidate()", "None"),
        "trace/test_conclusions.py::test_a_compare_that_fails_leaves_nothing_to_judge",
    ),
    "NaN in an operator's error": Guard(
        "probe/referee/rounding.py",
        *("values.where(values.isfinite(), math.inf)", "values.nan_to_num()"),
        "probe/referee/test_rounding.py::test_what_is_not_finite_is_infinitely_off",
    ),
    "an error where nothing may be": Guard(
        "probe/referee/rounding.py",
        "exponent.clamp_(min=_LEAST_EXPONENT[dtype] + 1 + _ONE_HALF)",
        "exponent.add_(_ONE_HALF * (exponent == 0))",
        "probe/referee/test_rounding.py::test_an_error_where_the_exact_output_is_zero_counts",
    ),
    "a row that is another's": Guard(
        "probe/referee/recorded.py",
        "[self._rows.digests(name)[number] for name in (site.name, *site.inputs)]",
        "[self._rows.digests(name)[number] for name in (site.name,)]",
        f"{_REFEREE}::test_a_planted_fault_is_named_on_its_side[a norm's row is stale-rollout]",
    ),
    "an embedding that is another's": Guard(
        "probe/referee/recorded.py",
        '{"embedding": token, "log_softmax": np.roll(token, -1)}',
        '{"log_softmax": np.roll(token, -1)}',
        f"{_REFEREE}::test_a_planted_fault_is_named_on_its_side[a token's embedding is another's"
        "-rollout]",
    ),
    "values that were not kept": Guard(
        "probe/referee/recorded.py",
        *("good &= self._index.prefix_all(self._rows.finite(name))", "pass"),
        f"{_REFEREE}::test_what_reads_a_nan_is_not_judged_by_it",
    ),
    "a checkpoint that was replaced": Guard(
        "probe/referee/weights.py",
        *("not self._checkpoint.holds(parameter, self._live[live].digest)", "False"),
        f"{_REFEREE}::test_a_checkpoint_that_was_replaced_since",
    ),
    "what a sum of exponentials loses": Guard(
        *("probe/referee/reference.py", "lost_share(exponentials, self._orders)", "0"),
        "probe/referee/test_exponentials.py::test_running_totals_of_blocks",
    ),
    "small exponentials that a large total swallows": Guard(
        *("probe/referee/exponentials.py", "systematic.square() + by_chance", "by_chance"),
        "probe/referee/test_exponentials.py::test_running_totals_of_blocks",
    ),
    "another pass is other values": Guard(
        "probe/referee/recorded.py",
        *("read |= dict.fromkeys(site.prefix_inputs, self._up_to(number))", "pass"),
        f"{_REFEREE}::test_a_decode_that_differs_in_one_row_is_recomputed",
    ),
    "the worst row": Guard(
        *("probe/referee/row_choice.py", "max(0, position + 1 - ROWS)", "0"),
        "probe/referee/test_row_choice.py::test_of_a_long_sample_the_rows_up_to_the_worst",
    ),
    "the worst statistic": Guard(
        "judge/checks.py",
        *("max(checks, key=lambda check: (not check.holds, check.excess))", "checks[0]"),
        "judge/test_budgets.py::test_each_statistic_has_its_bound",
    ),
    "both sides": Guard(
        "judge/verdict.py",
        *('"both" if len(sides) > 1 else next(iter(sides), None)', "next(iter(sides), None)"),
        "judge/test_budgets.py::test_sides",
    ),
    "a side that was not recomputed": Guard(
        "judge/verdict.py",
        "all(u.errors and budget_of(verdict.contract, u) for u in units)",
        "all(budget_of(verdict.contract, u) for u in units)",
        "judge/test_budgets.py::test_within_rounding_and_too_far_apart",
    ),
    "a side that computed with another weight": Guard(
        *("judge/verdict.py", "any(u.other_weight for u in unchecked)", "False"),
        "judge/test_budgets.py::test_nobody_is_called_off_where_the_other_side_has_another_weight",
    ),
    "each side by its own dtype": Guard(
        "judge/budgets.py",
        *('not contract.budgets or unit.dtype in ("", *contract.dtypes)', "True"),
        "judge/test_budgets.py::test_a_side_of_another_dtype_is_held_to_the_budgets_of_that_dtype",
    ),
    "operators that were left out": Guard(
        *("judge/verdict.py", "contract.budgets and c.edges and not c.referee", "False"),
        "judge/test_budgets.py::test_what_was_not_recomputed_is_told",
    ),
    "noise proves nothing": Guard(
        *("compare/divergence.py", "~noisy[paired.number]", "True"),
        "compare/test_divergence.py::test_a_row_that_its_engine_does_not_repeat_is_no_introducer",
    ),
}


def witnesses_pass(package: Path, *witnesses: str) -> bool:
    """Whether these tests pass against the `rlk_align` that lies in `package`."""
    tests = [str(ROOT / "tests" / witness) for witness in witnesses]
    settings = ["-x", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml")]
    code = "import pytest, sys; sys.exit(pytest.main(sys.argv[1:]))"
    words = ["-c", code, *settings, "--rootdir", str(ROOT), *tests]
    # The package's folder is the process's, so that the copy comes before the checkout.
    code, *streams = ended("tests", words, {"PYTHONPATH": str(package)}, package, 120)
    text = "".join(streams)
    assert code in (0, 1), text
    noticed = ("AssertionError", "DID NOT RAISE", "ValidationError")
    assert code == 0 or any(words in text for words in noticed), text
    return code == 0


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    source = Path(rlk_align.__file__).parent
    shutil.copytree(
        source, tmp_path / "rlk_align", ignore=shutil.ignore_patterns("__pycache__", "data")
    )
    for folder in ("contracts", "fixtures"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    return tmp_path


def test_the_witnesses_pass_as_things_are(copy: Path) -> None:
    assert witnesses_pass(copy, *(g.witness for g in GUARDS.values()))


class Replace(ast.NodeTransformer):
    """Puts one node instead of every node that is written like another, and counts them."""

    def __init__(self, guard: Guard) -> None:
        self.code, self.without = (_node(text) for text in (guard.code, guard.without))
        self.count = 0

    def visit(self, node: ast.AST) -> ast.AST:
        if ast.dump(node) == ast.dump(self.code):
            self.count += 1
            return self.without
        return self.generic_visit(node)


def _node(text: str) -> ast.AST:
    [statement] = ast.parse(text).body
    return statement.value if isinstance(statement, ast.Expr) else statement


@pytest.mark.parametrize("name", GUARDS)
def test_a_missing_guard_is_noticed(copy: Path, name: str) -> None:
    guard = GUARDS[name]
    file, _, function = guard.where.partition("::")
    path = copy / "rlk_align" / file
    tree = ast.parse(path.read_text(encoding="utf-8"))
    replace = Replace(guard)
    inside = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == function]
    for part in inside if function else [tree]:
        replace.visit(part)
    assert replace.count == 1, f"{guard.where} no longer holds the guard as written here"
    path.write_text(ast.unparse(ast.fix_missing_locations(tree)), encoding="utf-8")
    assert not witnesses_pass(copy, guard.witness)
