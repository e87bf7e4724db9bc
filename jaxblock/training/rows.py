"""Rows of a global batch: which of them a process reads, and a check of those that are asked for."""

from collections.abc import Sequence

from jaxblock.contracts import check_integer


def process_rows(batch: int, processes: int, index: int) -> range:
    """Return the rows of the global batch that process `index` of `processes` reads, in a loop of your own.

    (On a mesh, `parallel.placement` reads those that the devices of a process hold.)

    They are contiguous and in the order of the processes, so all processes' rows, one after the other, are the global
    batch. A process keeps no place of its own in the data: a run that goes on with another number of processes reads
    the same batches, each row once.

    Raises:
      ValueError: the processes do not divide the batch, or there is no process `index`.
    """
    check_integer("batch", batch, least=1)
    check_integer("processes", processes, least=1)
    check_integer("index", index, least=0, most=processes - 1)
    own, rest = divmod(batch, processes)
    if rest:
        raise ValueError(
            f"data.batch is {batch} and there are {processes} processes; they must divide the batch"
        )
    return range(index * own, (index + 1) * own)


def checked_rows(rows: Sequence[int], batch: int) -> Sequence[int]:
    """Return `rows`; raises ValueError unless each is a row of a batch of that size."""
    if any(not 0 <= row < batch for row in rows):
        raise ValueError(f"rows are {list(rows)}; each must be at least 0 and below the batch size {batch}")
    return rows
