"""What to do next, by what a verdict rests on."""

from pathlib import Path

from comparisons import comparison, contract, edge, metrics

from rlk_align.judge.verdict import judge
from rlk_align.report.words import next_step


def test_edges_that_a_side_never_shows_are_to_be_left_out(tmp_path: Path) -> None:
    """vLLM's log-probs of a prompt are raw: no more tokens would make the two conclusive."""
    hidden = [("logprob", "raw, whatever processing sampled ones get", True)]
    none = {"metrics": metrics(tokens=0), "unpaired": hidden}
    shown = edge("decode_vs_train")
    edges = (edge("decode_vs_prefill", **none), edge("prefill_vs_train", **none), shown)
    verdict = judge(comparison(*edges), contract())
    assert verdict.status == "inconclusive"
    assert next_step(verdict, tmp_path).endswith("--edges decode_vs_train")
    blind = comparison(shown, controls=None)
    assert "correct what is named above" in next_step(judge(blind, contract()), tmp_path)
    few = edge("prefill_vs_train", metrics=metrics(tokens=0))
    assert "--max-new-tokens" in next_step(judge(comparison(few, shown), contract()), tmp_path)
