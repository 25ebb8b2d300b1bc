"""Sentences about a rescored dump that its outputs share."""

import re
import shlex

from rlk_align.rescore.record import Rescored


def chosen(rescored: Rescored) -> str:
    """Which sequences were scored again."""
    tokens = f"{rescored.own.tokens:,} scored tokens"
    if not rescored.worst:
        return f"{tokens} of {rescored.chosen:,} sequences, all that can be scored"
    drawn = rescored.chosen - rescored.worst
    return (
        f"{tokens} of {rescored.chosen:,} of {rescored.usable:,} sequences: the "
        f"{rescored.worst:,} with the largest mean |Δ|, and {drawn:,} drawn by the seed"
    )


def temperature(rescored: Rescored) -> str:
    """At which temperature the ids were scored, and how."""
    if rescored.temperature == 1.0:
        return "temperature 1, over the whole vocabulary"
    return (
        f"temperature {rescored.temperature:g}, over the whole vocabulary: the recorded logits are "
        "divided by it, in float64"
    )


def next_command(text: str, dump: str, scores: str) -> str:
    """A command with the folders in the places of DUMP and RUN."""
    folders = {"DUMP": shlex.quote(dump), "RUN": shlex.quote(scores)}
    return re.sub(r"\b(DUMP|RUN)\b", lambda match: folders[match[0]], text)
