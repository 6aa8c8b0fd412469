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
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import torch.distributed
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from guardbit import private

T = TypeVar("T")

#: Seconds that a rank waits for the others.
EXCHANGE_SECONDS = 60.0
#: Numbers of an exchange: gloo ends the process if ranks that part bring different lengths.
_ROOM = 9

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


def all_agree(holds: bool, about: object) -> bool:
    """Whether something holds on every rank, and about the same thing."""
    if world_size() == 1:
        return holds
    answers = gathered("agree", holds, zlib.crc32(repr(about).encode()))
    return all(holds == 1 and about == answers[0][1] for holds, about in answers)


class Exchanged(NamedTuple, Generic[T]):
    """What the ranks said, on all of them."""

    values: list[T]  # one of each part
    numbers: list[tuple[float, ...]]  # of each rank
    state: tuple[Tensor, Tensor] | None  # as of `reduced`, if all ranks have brought one alike


def of_each_part(what: str, value: T, part: object, seconds: float | None = None) -> list[T]:
    """Returns one value, `what` it is, for each part of a model, on all ranks.

    It waits `seconds` for the others, else `EXCHANGE_SECONDS`.
    """
    return exchanged(what, value, part, seconds=seconds).values


def exchanged(
    what: str,
    value: T,
    part: object,
    *numbers: float,
    state: tuple[Tensor, Tensor] | None = None,
    about: object = None,
    seconds: float | None = None,
) -> Exchanged[T]:
    """Exchanges a value of each part, four numbers of each rank at most, and sums and maxima.

    `about` is what the state is of. It takes one gather, one reduction if there are states, and one
    broadcast a part if ranks say different things.
    """
    if world_size() == 1:
        return Exchanged([value], [numbers], state)
    mine = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    brought = 0 if state is None else zlib.crc32(repr((about, [x.shape for x in state])).encode())
    codes = zlib.crc32(repr(part).encode()), len(mine), zlib.crc32(mine.numpy().tobytes()), brought
    answers = gathered(what, *codes, *numbers, seconds=seconds)
    parts, sizes, contents, states = zip(*(each[:4] for each in answers), strict=True)
    others = [each[4:] for each in answers]
    together = reduced(*state) if state and {*states} == {brought} else None
    if len({*zip(parts, sizes, contents, strict=True)}) == 1:
        return Exchanged([value], others, together)
    said: list[Tensor] = []
    with _own_group() as own:
        # The first rank of each part speaks for it.
        for speaker in (parts.index(one) for one in dict.fromkeys(parts)):
            size = int(sizes[speaker])
            said.append(
                mine if rank() == speaker else torch.empty(size, dtype=torch.uint8, device="cpu")
            )
            own.broadcast(said[-1], speaker).wait()
    values = [pickle.loads(one.numpy().tobytes()) for one in said]
    return Exchanged(values, others, together)


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
