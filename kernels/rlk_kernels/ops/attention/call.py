"""One call of attention on a GPU: its inputs, how it runs, and its memory."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True)
class PieceList:
    """Which queries attend to which keys where keys are split (`schedule.py`): int32 on the
    device."""

    entries: Tensor
    pieces: Tensor
    special: bool
    """For the kernels written for Hopper."""


@dataclass(slots=True)
class AttentionCall:
    """The inputs of a call. Only `forward` changes it, to allocate `out`; a frozen dataclass would
    take the host six times as long to make."""

    q: Tensor
    """[T, Hq, D]."""
    k: Tensor
    """[S, Hk, D], or with a table [blocks, P, Hk, D]; v too."""
    v: Tensor
    cu_q: Tensor
    """[B + 1]: where the queries of each sequence begin."""
    lens_k: Tensor
    """[B + 1]: where the keys of each sequence begin; with a table [B]: how many there are."""
    table: Tensor | None
    """[B, blocks of a sequence]."""
    causal: bool
    scale: float
    window: int | None
    softcap: float = 0.0
    """0: no cap. The kernels for Hopper have no cap."""
    out: Tensor | None = None
    """[T, Hq, D], contiguous; None until there is memory for it."""
    shared: PieceList | None = None
    """Made for all calls with the same tables and lengths (`forward.paged_pieces`)."""
    keeps_lse: bool = True
    """False where lse is not requested: it then lies in the call's scratch, which may be returned
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
        """The window, strides of q and of heads, pages in rows, and the table's stride."""
        k, v, table = self.k, self.v, self.table
        pages = (0, 0) if table is None else (x.stride(0) // x.stride(1) for x in (k, v))
        return (
            self.window or 0, q.stride(0), q.stride(1), k.stride(-2), v.stride(-2), *pages,
            0 if table is None else table.stride(0),
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPlan:
    """How keys are walked: time alone, no bit."""

    special: bool
    """The kernels written for Hopper run."""
    rows: int
    """Packed rows of a program."""
    split: bool
    """Keys are taken in pieces (`schedule.py`)."""
    listed: bool
    """Pieces come from a list; those of a batch of one sequence need none."""
    alone: bool
    """Few rows of one sequence: eight warps take them, and the program that ends last merges
    (`hopper/merge_last.py`)."""
    whole: bool
    """No row has more than one chunk of keys: pieces are blocks of rows, and nothing is merged."""
    slots: int
    """Packed rows of one KV head that have room in the scratch."""
    scratch: tuple[tuple[int, ...], ...]
    """What lies there, where keys are split: flags where `alone`, accumulators, (maximum, sum)."""
    most: int
    """Pieces of one KV head that there can be."""
    target: int
    """Pieces of all KV heads to aim for, where there is enough work."""

    @property
    def running(self) -> bool:
        """Blocks keep the sum of their merged chunks in a slot."""
        return self.special and self.rows == 64


@dataclass(slots=True)
class Scratch:
    """Memory of a call apart from its result."""

    lse: Tensor
    """[Hq, T]: a result too, where the call keeps it."""
    acc: Tensor
    """Accumulators that wait to be merged, and `max_sum`: (maximum, sum) of each."""
    max_sum: Tensor
    flags: Tensor
    """Which pieces have ended (`hopper/merge_last.py`)."""
    entries: Tensor
    """The entries of a `PieceList`; `pieces` are its pieces."""
    pieces: Tensor

    @classmethod
    def unused(cls, lse: Tensor, cu_q: Tensor) -> "Scratch":
        """lse alone. A kernel takes a pointer even where it reads nothing: lse or cu_q serves."""
        return cls(lse, lse, lse, lse, cu_q, cu_q)
