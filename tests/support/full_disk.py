"""What a full disk does to a process."""

import resource

from rlk_align.record.train import weight_files
from rlk_align.trace import writer


def fill_disk(size: int) -> None:
    """Makes writes beyond a size of a file, in bytes, fail in this process, which from now on
    writes rows and weights as it gets them."""
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, most))
    writer.FLUSH_BYTES = weight_files.FILE_BYTES = 1
