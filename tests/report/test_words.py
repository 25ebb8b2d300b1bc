"""What to do next, by what a verdict rests on."""

from pathlib import Path

from comparisons import comparison, contract, edge, metrics

from rlk_align.judge.verdict import judge
from rlk_align.report.words import next_step, production_words
from rlk_align.results import GraphReplays, ProductionPass


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
    assert "correct the causes named above" in next_step(judge(blind, contract()), tmp_path)
    few = edge("prefill_vs_train", metrics=metrics(tokens=0))
    assert "--max-new-tokens" in next_step(judge(comparison(few, shown), contract()), tmp_path)


def test_cuda_graphs_are_claimed_where_some_were_replayed_alone() -> None:
    def said(**changes: object) -> str:
        fields = {"metrics": metrics(tokens=90), "expected": 100}
        return production_words(ProductionPass(**fields | changes))

    some = GraphReplays(
        steps=9, replayed_steps=8, replays={"full": 6, "piecewise": 14}, captured={"full": 35}
    )
    assert said(graphs=some) == (
        "90 of 100 tokens compared; 20 CUDA graph replays (6 full, 14 piecewise) in 8 of 9 steps"
    )
    none = some.model_copy(update={"replayed_steps": 0, "replays": {}})
    assert said(graphs=none).endswith("compared; no CUDA graph was replayed in 9 steps")
    assert said(graphs=none.model_copy(update={"replays": {"full": 0}})) == said(graphs=none)
    assert said() == "90 of 100 tokens compared; without CUDA graphs"
    assert "2 samples depart from the observed text (first sample 3, after position 41)" in said(
        parted=[(3, 41), (5, 7)]
    )
    assert ", 1 sample departs from the observed text (first" in said(parted=[(3, 41)])
