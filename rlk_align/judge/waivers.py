"""Waivers: breaches that a named owner excuses until a date."""

import os
from collections.abc import Sequence
from datetime import UTC, date, datetime
from typing import Literal

from rlk_align.judge.checks import LimitCheck
from rlk_align.judge.contract import Waiver
from rlk_align.results import Result


class WaiverUse(Result):
    """The state of a waiver on the day of the verdict."""

    waiver: Waiver
    state: Literal["used", "unused", "expired"]
    days_left: int
    """The days for which the waiver is still valid; negative after it has expired."""
    breaches: int
    """The number of breaches that the waiver excuses."""

    def __str__(self) -> str:
        w = self.waiver
        when = {
            "used": f"{self.breaches} breaches, {self.days_left} days left",
            "unused": "nothing to excuse: remove it",
            "expired": f"expired {-self.days_left} days ago",
        }[self.state]
        return f"{w.limit}, {w.owner} until {w.expires}: {when}; {w.reason}"


def today() -> date:
    """Returns the current day; SOURCE_DATE_EPOCH, in seconds of Unix time, overrides it."""
    epoch = os.environ.get("SOURCE_DATE_EPOCH", "")
    now = datetime.fromtimestamp(int(epoch), UTC) if epoch.isdecimal() else datetime.now(UTC)
    return now.date()


def waive(
    checks: Sequence[LimitCheck], waivers: Sequence[Waiver], day: date
) -> tuple[list[LimitCheck], list[WaiverUse]]:
    """Returns the checks, each breach with the waiver that excuses it, and the state of each
    waiver. An expired waiver excuses nothing, and no waiver excuses a NaN or an infinity."""
    done, uses = list(checks), []
    for waiver in waivers:
        days_left = (waiver.expires - day).days
        used = 0
        for at, check in enumerate(done):
            excused = not check.holds and check.waiver is None and check.metric != "nonfinite"
            if days_left >= 0 and excused and waiver.covers(check.limit, check.site, check.edge):
                done[at] = check.model_copy(update={"waiver": waiver})
                used += 1
        state: Literal["used", "unused", "expired"] = "used" if used else "unused"
        if days_left < 0:
            state = "expired"
        uses.append(WaiverUse(waiver=waiver, state=state, days_left=days_left, breaches=used))
    return done, uses
