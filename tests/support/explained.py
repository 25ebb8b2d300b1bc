"""What `explain` says of simulated log-probs, by the contract that ships."""

from rlk_align.logs.diagnose.contract import load_run_contract
from rlk_align.logs.diagnose.explain import Explanation, explain
from rlk_align.logs.dumps.sequences import Sequences

CONTRACT = load_run_contract()


def explained(run: Sequences) -> Explanation:
    return explain([run], CONTRACT)
