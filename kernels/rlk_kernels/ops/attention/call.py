"""A call of attention on a GPU: its inputs, its plan and its memory."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True)
class PieceList:
    """The pieces of work where keys are split (`schedule.py`), in int32 on the device."""

    entries: Tensor
    pieces: Tensor
    special: bool
    """Whether it is for the kernels for Hopper."""


@dataclass(slots=True)
class AttentionCall:
    """The inputs of a call. Only `forward` changes it, to allocate `out`; the host would take six
    times as long to construct a frozen dataclass."""

    q: Tensor
    """[T, Hq, D]."""
    k: Tensor
    """[S, Hk, D], or with a table [blocks, P, Hk, D]; v too."""
    v: Tensor
    cu_q: Tensor
    """[B + 1]: the begin of the queries of each sequence."""
    lens_k: Tensor
    """[B + 1]: the begin of the keys of each sequence; with a table [B]: their number."""
    table: Tensor | None
    """[B, blocks of a sequence]."""
    causal: bool
    scale: float
    window: int | None
    softcap: float = 0.0
    """0: no cap. The kernels for Hopper do not support a cap."""
    out: Tensor | None = None
    """[T, Hq, D], contiguous; None until it is allocated."""
    shared: PieceList | None = None
    """The list of all calls with the same tables and lengths (`forward.paged_pieces`)."""
    keeps_lse: bool = True
    """False if lse is not requested: it is then in the call's scratch, which may be returned
    instead."""

    @property
    def batch(self) -> int:
        return self.cu_q.numel() - 1

    @property
    def kv_heads(self) -> int:
        return self.k.shape[-2]

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.q.shape[1] // self.k.shape[-2]

    @property
    def page(self) -> int:
        """Keys of a block of the cache; 0 without a table."""
        return 0 if self.table is None else self.k.shape[1]

    def hopper_strides(self, q: Tensor) -> tuple[int, ...]:
        """(window, strides of q, strides of heads of k and v, rows of their pages, table
        stride)."""
        k, v, table = self.k, self.v, self.table
        pages = (0, 0) if table is None else (x.stride(0) // x.stride(1) for x in (k, v))
        return (
            self.window or 0, q.stride(0), q.stride(1), k.stride(-2), v.stride(-2), *pages,
            0 if table is None else table.stride(0),
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPlan:
    """The order of work over the keys, which changes the time and no bit."""

    special: bool
    """The kernels for Hopper run."""
    rows: int
    """Packed rows of a program."""
    split: bool
    """Keys are split into pieces (`schedule.py`)."""
    listed: bool
    """Pieces come from a list; a batch of one sequence needs no list."""
    alone: bool
    """Few rows of one sequence: eight warps process them, and the program that ends last merges
    (`hopper/merge_last.py`)."""
    merged: bool
    """Rows may have several pieces, which another kernel merges (`merge.py`)."""
    programs: int
    """The programs that store the sum of merged chunks in memory of their own; 0: no program
    does."""
    whole: bool
    """No row has more than one chunk of keys, so pieces are blocks of rows without a merge."""
    slots: int
    """The packed rows of one KV head for which the scratch has room."""
    scratch: tuple[tuple[int, ...], ...]
    """The shapes in the scratch of split keys: flags if `alone`, accumulators, (maximum, sum), the
    sums of merged chunks of each program."""
    most: int
    """The most pieces of one KV head."""
    target: int
    """The intended number of pieces of all KV heads, if there is enough work; 1: each block of rows
    is one piece."""


@dataclass(slots=True)
class Scratch:
    """The memory of a call besides its result."""

    lse: Tensor
    """[Hq, T], which is a result too if the call keeps it."""
    acc: Tensor
    """Accumulators that are not merged yet; `max_sum`: (maximum, sum) of each."""
    max_sum: Tensor
    running: Tensor
    """The sums of merged chunks of each program, if programs store them in memory."""
    flags: Tensor
    """The pieces that have ended (`hopper/merge_last.py`)."""
    entries: Tensor
    """The entries of a `PieceList`; `pieces`: its pieces."""
    pieces: Tensor

    @classmethod
    def unused(cls, lse: Tensor, cu_q: Tensor) -> "Scratch":
        """lse alone. Pointers that a kernel does not read are those of lse and cu_q."""
        return cls(lse, lse, lse, lse, lse, cu_q, cu_q)
