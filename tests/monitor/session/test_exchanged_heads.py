"""Ranks that exchange tokens for heads, as Ulysses does: heads do not map to rows of W_Q."""

import json
import textwrap

import pytest

from tests.callbacks.several_ranks import launch
from tests.monitor.session.plain_loop import SITES

WORKER = textwrap.dedent(
    """
    import json, logging, os, sys
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch import nn

    from guardbit import MonitorSession
    from guardbit.monitor.policy import Policy
    from tests.monitor.session.plain_loop import SITES, LoudRow

    rank, (folder, way) = int(os.environ["RANK"]), sys.argv[1:]
    other = 1 - rank
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)


    class Exchange(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, cut, join):
            ctx.dims = cut, join
            parts = torch.stack(x.chunk(2, cut))
            got = torch.empty_like(parts)
            if way == "all_to_all":
                dist.all_to_all_single(got, parts)
            else:
                got[rank] = parts[rank]
                sent = dist.isend(parts[other].contiguous(), other)
                dist.irecv(got[other], other).wait()
                sent.wait()
            return torch.cat(got.unbind(), join)

        @staticmethod
        def backward(ctx, gradient):
            cut, join = ctx.dims
            return Exchange.apply(gradient, join, cut), None, None


    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(64, 64, bias=False) for _ in range(3))

        def forward(self, x):
            q, k, v = (f(x).unflatten(-1, (4, 16)) for f in (self.q, self.k, self.v))
            q, k, v = (Exchange.apply(y, 2, 1).transpose(1, 2) for y in (q, k, v))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return x + Exchange.apply(y.transpose(1, 2), 1, 2).flatten(2)


    def train(watched):
        torch.manual_seed(0)
        layers = nn.Sequential(Attention(), Attention()).bfloat16()
        model = nn.ModuleDict({"layers": layers})
        with torch.no_grad():
            layers[0].q.weight[32:48] *= 100  # rank 1's first head
        session, refused = None, None
        if watched:
            session = MonitorSession(
                model, every_n_train_steps=1, rules=(LoudRow(),),
                policy=Policy("compensated", scope="head"), dirpath=f"{folder}/run{rank}",
            )
        for step in range(3):
            x = torch.full((1, 12, 64), 0.1 * rank) + 0.01 * torch.arange(12)[:, None]
            if watched:
                session.begin_batch(step)
            layers(x.bfloat16()).float().square().mean().backward()
            if step == 0:
                first = [p.grad.clone() for p in layers.parameters()]
            if watched:
                session.end_step()
        if watched:
            try:
                session.switch(SITES[0], "exact_delta", heads=[0])
            except ValueError as error:
                refused = str(error)
            asked = session.instrumentation.asked()
            session.close()
            return first, refused, asked
        return first


    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("guardbit").addHandler(handler)
    plain = train(False)
    first, refused, asked = train(True)
    alike = [torch.equal(*pair) for pair in zip(plain, first)]
    with open(f"{folder}/{rank}.json", "w") as file:
        json.dump([refused, asked, alike, lines], file)
    dist.destroy_process_group()
    """
)


@pytest.mark.parametrize("way", ["all_to_all", "send"])
def test_heads_that_ranks_exchange_are_not_told_apart_and_are_switched_all_or_none(tmp_path, way):
    (tmp_path / "worker.py").write_text(WORKER)
    launch(tmp_path / "worker.py", 2, tmp_path, way)
    for rank in range(2):
        refused, asked, alike, lines = json.loads((tmp_path / f"{rank}.json").read_text())
        assert (
            "cannot be switched one by one: ranks exchange tensors before it calls attention"
            in refused
        )
        # The rule names one head.
        assert asked == {SITES[0]: ["none"] * 2, SITES[1]: ["compensated"] * 2}
        assert all(alike), "before the switch"
        told = [line for line in lines if line.startswith("heads cannot be told apart at")]
        assert len(told) == (rank == 0)
        assert all(
            SITES[0] in line and "may each be another head on each rank" in line for line in told
        )
