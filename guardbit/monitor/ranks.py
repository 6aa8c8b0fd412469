"""What the ranks of a distributed run exchange; a single process exchanges nothing.

The ranks have a group of their own, on the host, so that what one of them misses does not mix with
the exchanges of training. A rank waits in it for `PATIENCE` seconds at most: after that the others
count as lost, and nothing is exchanged any more.
"""

from __future__ import annotations

import pickle
import zlib
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

T = TypeVar("T")

#: Seconds that a rank waits for the others.
PATIENCE = 60.0

# The group of the default process group, and that process group.
_group: tuple[Any, Any] | None = None
_num_groups = 0
_are_lost: Any = None


class RanksLostError(RuntimeError):
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
    mine = torch.tensor([int(holds), zlib.crc32(repr(about).encode())], dtype=torch.int64)
    answers = [other.tolist() for other in _exchanged("agree", mine)]
    return all(answers[0][1] == about and bool(holds) for holds, about in answers)


def extremes(*values: float) -> list[tuple[float, float]]:
    """Returns the smallest and the largest of each value over all ranks."""
    if world_size() == 1:
        return [(value, value) for value in values]
    everyone = torch.stack(_exchanged("extremes", torch.tensor(values, dtype=torch.float64)))
    lowest, highest = everyone.amin(0).tolist(), everyone.amax(0).tolist()
    return list(zip(lowest, highest, strict=True))


def of_each_part(value: T, part: object) -> list[T]:
    """Returns one value for each part of a model, on all ranks."""
    if world_size() == 1:
        return [value]
    mine = torch.tensor([zlib.crc32(repr(part).encode())], dtype=torch.int64)
    parts = [int(x) for x in _exchanged("parts", mine)]
    speakers = [parts.index(one) for one in dict.fromkeys(parts)]
    said = pickle.dumps(value) if rank() in speakers else b""
    sizes = [int(x) for x in _exchanged("sizes", torch.tensor([len(said)], dtype=torch.int64))]
    padded = torch.frombuffer(bytearray(said.ljust(max(sizes), b"\0")), dtype=torch.uint8)
    everyone = _exchanged("values", padded)
    return [
        pickle.loads(everyone[speaker][: sizes[speaker]].numpy().tobytes()) for speaker in speakers
    ]


def gathered(x: Tensor, group: object = None) -> list[Tensor]:
    """Returns a tensor of each rank, all of one shape."""
    return [other.to(x.device) for other in _exchanged("tensors", x.detach().cpu().contiguous())]


def _exchanged(what: str, mine: Tensor) -> list[Tensor]:
    global _are_lost
    default = torch.distributed.group.WORLD
    if _are_lost is default:
        raise RanksLostError("another rank was lost before; nothing is exchanged any more")
    try:
        own = _own_group(default)
        head = torch.tensor([zlib.crc32(what.encode()), mine.nbytes], dtype=torch.int64)
        if any(not other.equal(head) for other in _all_gather(own, head)):
            raise RuntimeError("it takes part in another exchange")
        return _all_gather(own, mine)
    except BaseException as error:
        _are_lost = default  # whatever it was: the others may wait in the middle of it
        if isinstance(error, RuntimeError):
            why = _first_line(error)
            raise RanksLostError(f"another rank did not answer as it should: {why}") from error
        raise


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def _all_gather(own: Any, mine: Tensor) -> list[Tensor]:
    found = [torch.empty_like(mine) for _ in range(world_size())]
    options = c10d.AllgatherOptions()  # pyright: ignore[reportPrivateImportUsage]
    options.timeout = timedelta(seconds=PATIENCE)
    own.allgather([found], [mine], options).wait(options.timeout)
    return found


def _own_group(default: Any) -> Any:
    global _group, _num_groups
    if _group is None or _group[1] is not default:
        # Not by `new_group`: that counts groups, and the count has to stay the same on all ranks.
        prefix = c10d.PrefixStore(f"guardbit/{_num_groups}", c10d._get_default_store())
        _num_groups += 1
        try:
            own = c10d.ProcessGroupGloo(
                prefix, torch.distributed.get_rank(), world_size(), timedelta(seconds=PATIENCE)
            )
        except RuntimeError as error:
            raise RuntimeError(
                f"gloo could not connect the ranks ({_first_line(error)}); on several machines the"
                " environment variable GLOO_SOCKET_IFNAME says over which network interface to try"
            ) from error
        _group = own, default
    return _group[0]


def device() -> torch.device:
    """Returns the device of what ranks measure."""
    if torch.distributed.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
