"""One step of a server while it is recorded: its decode pass, and then the passes that score it."""

from contextlib import suppress

from rlk_align.errors import BadOption, RlkError
from rlk_align.record.rollout.core import OWN, Core, LiveRequest, Output
from rlk_align.record.rollout.window import Tracked, Window, write_logprobs
from rlk_align.record.shared.shard import SCORED, Shard
from rlk_align.trace.writer import PassWriter


class Step:
    """The recording of one step."""

    def __init__(self, core: Core, shard: Shard, sequences: int) -> None:
        self._core, self._shard, self._sequences = core, shard, sequences
        self.window = Window(sequences)
        self._decode: PassWriter | None = None
        self._chosen: list[Tracked] | None = None
        """The sequences that are scored; None while some are still sampled."""
        self._scored: dict[str, Tracked] = {}
        """Request that scores a sequence -> the sequence's own request, in the running pass."""
        self._scores: dict[int, list[float]] = {}
        self._writer: PassWriter | None = None
        """That of the running pass that scores."""
        self._passes = list(SCORED)

    def offer(self, request: LiveRequest) -> bool:
        """Taps a request of the step if it is to be recorded, and says whether it is."""
        tracked = self.window.offer(request)
        if tracked is None:
            return False
        if self._decode is None:
            self._decode = self._core.together(lambda: self._open(request))
        first = len(tracked.prompt) - 1
        self._core.tap(request.name, tracked.number, range(first, self._core.context))
        return True

    def _open(self, first: LiveRequest) -> PassWriter:
        self._core.describe(self._shard, first)
        writer = self._shard.writer("decode")
        self._core.begin_pass(writer, "decode")
        return writer

    def take(self, output: Output) -> None:
        """Takes what the engine says of a request."""
        if output.name in self._scored:
            each = self._scored[output.name]
            self._scores.setdefault(each.number, []).extend(output.scores)
            if output.ended:
                del self._scored[output.name]
                self._core.untap(output.name)
        elif (tracked := self.window.tracked.get(output.name)) is not None:
            tracked.logprobs += output.logprobs
            if output.ended:
                self.end(tracked, output.left_out)

    def end(self, tracked: Tracked, left_out: str) -> None:
        """Takes the end of a request. `left_out`: why it cannot be chosen."""
        if not tracked.finished:
            tracked.finished, tracked.left_out = True, left_out
            self._core.untap(tracked.request.name)

    def advance(self) -> bool:
        """Begins the next pass if the running one is complete. Whether the step is complete."""
        if self._scored or (self._chosen is None and not self.window.sampled):
            return False
        return self._core.together(self._go_on)

    def _go_on(self) -> bool:
        if self._chosen is None:
            self._end_decode()
        if self._writer is not None:
            self._end_scoring(self._writer)
        if self._passes:
            self._begin_scoring(self._passes.pop(0))
            return False
        self._finish()
        return True

    def abandon(self, reason: str) -> None:
        """Gives the step up."""
        if self._scored:
            self._core.abort(list(self._scored))
        with suppress(RlkError):
            self._core.end_pass()
        self._shard.abandon(reason)

    def _end_decode(self) -> None:
        self._chosen = self.window.chosen(self._core.context)
        if self._decode is None or not self._chosen:
            raise BadOption(f"no request of the step could be recorded: {self.window.reasons()}")
        for each in self.window.tracked.values():
            self._decode.took_from_cache(each.number, each.cached)
            write_logprobs(self._decode, each.number, each.sample, each.logprobs)
        self._end(self._decode, "decode")

    def _begin_scoring(self, name: str) -> None:
        assert self._chosen is not None
        self._writer = self._shard.writer(name)
        tapped = not name.endswith(".untapped")
        if tapped:
            self._core.begin_pass(self._writer, "prefill")
        for each in self._chosen:
            request = f"{OWN}{self._shard.path.parent.name}-{name}-{each.number}"
            self._scored[request] = each
            if tapped:
                self._core.tap(request, each.number, _sampled(each))
        for request, each in self._scored.items():
            self._core.score(request, each.request)

    def _end_scoring(self, writer: PassWriter) -> None:
        assert self._chosen is not None
        for each in self._chosen:
            scores, sampled = self._scores.pop(each.number), len(_sampled(each))
            write_logprobs(writer, each.number, each.sample, scores[len(scores) - sampled :])
        self._end(writer, "prefill")
        self._writer = None

    def _end(self, writer: PassWriter, kind: str) -> None:
        self._core.end_pass()
        with writer:
            writer.finish(self._core.engine.unexposed(kind))

    def _finish(self) -> None:
        assert self._chosen is not None
        tracked = list(self.window.tracked.values())
        self._shard.save_prompts(each.prompt for each in tracked)
        self._shard.finish(
            self.window.batch(),
            [each.number for each in self._chosen],
            self._sequences,
            self.window.seen,
            requests=[each.record() for each in tracked],
            unrecorded=dict(self.window.unrecorded),
            weight_version=self._core.weight_version(),
        )
        self._shard.complete()


def _sampled(tracked: Tracked) -> range:
    return tracked.sample.sampled_positions
