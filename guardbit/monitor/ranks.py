"""What the ranks of a distributed run exchange; a single process exchanges nothing.

They have a group of their own, on the host, apart from training's. A rank waits in it for
`EXCHANGE_SECONDS` at most: then the others count as lost, and nothing is exchanged any more.
"""

import atexit
import pickle
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from guardbit import private

T = TypeVar("T")

#: Seconds that a rank waits for the others.
EXCHANGE_SECONDS = 60.0
#: Numbers of an exchange: gloo ends the process if ranks that part bring different lengths.
_ROOM = 8

# The group of the default process group, and that process group.
_group: tuple[Any, Any] | None = None
_num_groups = 0
_are_lost: Any = None


class RanksLostError(ConnectionError):
    """Raised when another rank did not come to an exchange in time, and ever after."""


def world_size() -> int:
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if distributed else 1


def rank() -> int:
    return torch.distributed.get_rank() if world_size() > 1 else 0


def is_anywhere(what: str, is_so: bool) -> bool:
    """Whether something is so on any rank; all ask, and `what` it is."""
    return is_so if world_size() == 1 else any(so for (so,) in gathered(what, is_so))


def of_each_part(what: str, value: T, part: object, seconds: float | None = None) -> list[T]:
    """Returns one value, `what` it is, for each part of a model, on all ranks.

    It waits `seconds` for the others, else `EXCHANGE_SECONDS`.
    """
    values, _ = exchanged(what, value, part, seconds=seconds)
    return values


def exchanged(
    what: str, value: T, part: object, *numbers: float, seconds: float | None = None
) -> tuple[list[T], list[tuple[float, ...]]]:
    """Returns a value of each part of a model, and the numbers of each rank, five at most.

    It takes one gather, and one broadcast a part if ranks say different things.
    """
    if world_size() == 1:
        return [value], [numbers]
    mine = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    codes = zlib.crc32(repr(part).encode()), len(mine), zlib.crc32(mine.numpy().tobytes())
    answers = gathered(what, *codes, *numbers, seconds=seconds)
    parts, sizes, contents = zip(*(each[:3] for each in answers), strict=True)
    others = [each[3:] for each in answers]
    if len({*zip(parts, sizes, contents, strict=True)}) == 1:
        return [value], others
    said: list[Tensor] = []
    with _own_group() as own:
        # The first rank of each part speaks for it.
        for speaker in (parts.index(one) for one in dict.fromkeys(parts)):
            size = int(sizes[speaker])
            said.append(
                mine if rank() == speaker else torch.empty(size, dtype=torch.uint8, device="cpu")
            )
            own.broadcast(said[-1], speaker).wait()
    return [pickle.loads(one.numpy().tobytes()) for one in said], others


def reduced(sums: Tensor, maxima: Tensor) -> tuple[Tensor, Tensor]:
    """Returns sums, FP64, and maxima, of one shape on all ranks; NaN where a rank has NaN."""
    # As gloo's maximum may lose NaN, it is added to the sums instead.
    is_nan = maxima.isnan()
    added = torch.cat([sums.flatten(), is_nan.flatten().double()])
    larger = maxima.masked_fill(is_nan, -torch.inf)
    with _own_group() as own:
        works = [own.allreduce(added, torch.distributed.ReduceOp.SUM)]
        if larger.numel():
            works.append(own.allreduce(larger, torch.distributed.ReduceOp.MAX))
        for work in works:
            work.wait()
    found, is_nan = added.split([sums.numel(), maxima.numel()])
    return found.view_as(sums), larger.masked_fill(is_nan.view_as(larger) > 0, torch.nan)


def gathered(what: str, *numbers: float, seconds: float | None = None) -> list[tuple[float, ...]]:
    """Returns the numbers of each rank, which must all take part in the same exchange."""
    options = c10d.AllgatherOptions()  # pyright: ignore[reportPrivateImportUsage]
    options.timeout = timedelta(seconds=seconds or EXCHANGE_SECONDS)
    sent = [zlib.crc32(what.encode()), *numbers, *[0.0] * (_ROOM - len(numbers))]
    mine = torch.tensor(sent, dtype=torch.float64, device="cpu")
    found = [torch.empty_like(mine) for _ in range(world_size())]
    with _own_group() as own:
        own.allgather([found], [mine], options).wait()
        answers = [other.tolist() for other in found]
        if any(other[0] != mine[0] for other in answers):
            raise RuntimeError("it takes part in another exchange")
    return [tuple(others[: len(numbers)]) for _, *others in answers]


@contextmanager
def _own_group() -> Iterator[Any]:
    """Yields the ranks' own group; after any error in it the other ranks count as lost."""
    global _are_lost
    default = torch.distributed.group.WORLD
    if _are_lost is default:
        raise RanksLostError("another rank was lost before; nothing is exchanged any more")
    try:
        yield _group_beside(default)
    except BaseException as error:
        _are_lost = default  # whatever it was: the others may wait in the middle of it
        if isinstance(error, RuntimeError):
            why = _first_line(error)
            raise RanksLostError(f"another rank did not answer as it should: {why}") from error
        raise


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def _group_beside(default: Any) -> Any:
    global _group, _num_groups
    if _group is None or _group[1] is not default:
        # Not by `new_group`: that counts groups, and the count has to stay the same on all ranks.
        prefix = c10d.PrefixStore(f"guardbit/{_num_groups}", private.default_store())
        _num_groups += 1
        if prefix.check(["left"]):  # gloo would try five times to connect with nobody
            raise RuntimeError("it has given up waiting")
        try:
            longest = timedelta(seconds=EXCHANGE_SECONDS)
            rank = torch.distributed.get_rank()
            own = c10d.ProcessGroupGloo(prefix, rank, world_size(), longest)
        except RuntimeError as error:
            with suppress(RuntimeError):
                prefix.set("left", "")
            raise RuntimeError(
                f"gloo could not connect the ranks ({_first_line(error)}); on several machines the"
                " environment variable GLOO_SOCKET_IFNAME says over which network interface to try"
            ) from error
        _group = own, default
    return _group[0]


@atexit.register
def _let_go() -> None:
    """Ends the group while its threads can take the GIL, without which they abort the process."""
    global _group
    _group = None
