"""One of two ranks that share the heads of a model; started by `test_tensor_parallel`."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.attention import SDPBackend, sdpa_kernel

from guardbit import LayoutUnavailable, MonitorSession, Policy
from guardbit.kernels.spec import AttentionSpec
from guardbit.monitor.detectors import DEFAULT_RULES
from tests.callbacks.several_ranks import begin, keep, logged
from tests.oracle import attend
from tests.toys import Fires

HEADS, SIZE, WIDTH, STEPS = 4, 16, 32, 4

# PyTorch 2.11's math kernel flattens batch and heads, which DTensors allow for one sequence only.
SEQUENCES = 1 if torch.__version__ < "2.12" else 2

#: local: plain tensors with this rank's heads reach attention. dtensor: DTensors do. one_key: every
#: rank has the one key head. gathered: all heads are put together before attention. one_rank: the
#: mesh has one rank, beside another mesh of one.
WAYS = ("local", "compiled", "dtensor", "one_key", "gathered", "one_rank")

#: Those of which the rounding errors of BF16 are measured.
ROUNDED = ("local", "one_key", "gathered")


class Core(nn.Module):
    def forward(self, q, k, v):
        if not isinstance(q, DTensor):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        with sdpa_kernel(SDPBackend.MATH):  # on the CPU no other takes DTensors, nor this a mask
            return F.scaled_dot_product_attention(q, k, v)


class Attention(nn.Module):
    def __init__(self, key_heads=HEADS):
        super().__init__()
        self.q = nn.Linear(WIDTH, HEADS * SIZE, bias=False)
        self.k, self.v = (nn.Linear(WIDTH, key_heads * SIZE, bias=False) for _ in "kv")
        self.core = Core()
        self.out = nn.Linear(HEADS * SIZE, WIDTH, bias=False)

    def forward(self, x):
        q, k, v = (
            project(x).unflatten(-1, (-1, SIZE)).transpose(1, 2)
            for project in (self.q, self.k, self.v)
        )
        return x + self.out(self.core(q, k, v).transpose(1, 2).flatten(2))


class Model(nn.Module):
    """A layer whose heads are shared between the ranks, and one that each has whole."""

    def __init__(self, way="whole", mesh=None):
        super().__init__()
        torch.manual_seed(0)
        self.shared = Attention(1 if way == "one_key" else HEADS)
        self.whole = Attention()
        if mesh is not None:
            self.to(mesh.device_type)
            column = {
                "dtensor": {"use_local_output": False},
                "gathered": {"output_layouts": Replicate()},
            }.get(way, {})
            names = "q" if way == "one_key" else "qkv"
            plan = {name: ColwiseParallel(**column) for name in names}
            row = {"input_layouts": Replicate()} if way == "gathered" else {}
            parallelize_module(self.shared, mesh, {**plan, "out": RowwiseParallel(**row)})

    def forward(self, x):
        return self.whole(self.shared(x))


#: Head 3 is on the second rank.
RULES = (Fires("shared.core", (3,), sample=2), *DEFAULT_RULES)


def batch(step):
    return torch.randn(SEQUENCES, 12, WIDTH, generator=torch.Generator().manual_seed(step))


def loss_of(model, step):
    return model(batch(step).to(next(model.parameters()).device)).float().square().mean()


def steps(model, after=lambda step: None, session=None):
    """Loss of each step, and the sum of the gradients of all steps."""
    losses = []
    for step in range(STEPS):
        if session is not None:
            session.begin_batch(step)
        loss = loss_of(model, step)
        loss.backward()
        losses.append(loss.item())
        if session is not None:
            session.end_step()
        after(step)
    grads = (p.grad for p in model.parameters())
    return losses, [
        (g.to_local() if isinstance(g, DTensor) else g).double().sum().item() for g in grads
    ]


def train(folder, way, mesh):
    rank = torch.distributed.get_rank()

    def compiled(model):
        return torch.compile(model, backend="aot_eager") if way == "compiled" else model

    def watch(name, **settings):
        model = Model(way, mesh)
        path = folder / name if rank == 0 else None
        return model, MonitorSession(
            model, every_n_train_steps=1, strict=True, dirpath=path, **settings
        )

    plain = steps(compiled(Model(way, mesh)))
    model, session = watch("watched")
    samples = []
    watched = steps(compiled(model), lambda step: samples.extend(session.samples), session)
    norms = []
    for head in range(HEADS):
        try:
            weight = session.instrumentation.sites["shared.core"].query_weight(head)
            norms.append(torch.linalg.matrix_norm(weight, 2).item())
        except LayoutUnavailable as error:
            norms.append(str(error))
    try:
        session.instrumentation.check_switch("shared.core", "compensated", heads=[3])
        refusal = None
    except ValueError as error:
        refusal = str(error)
    session.close()

    model, session = watch("acted", rules=RULES, policy=Policy("compensated", scope="head"))
    sites, seen = session.instrumentation, []

    def look(step):
        site = sites.sites["shared.core"]
        ours = site.launches.get(("forward", "compensated"), 0)
        seen.append((site.num_heads, list(site.own_heads), site.stabilizers, ours))

    acted = steps(compiled(model), look, session)
    kept = session.state_dict()
    session.close()

    model, session = watch("resumed", rules=RULES, policy=Policy("compensated"))
    session.load_state_dict(kept)
    session.begin_batch(STEPS)
    loss_of(compiled(model), STEPS).backward()
    session.end_step()
    site = session.instrumentation.sites["shared.core"]
    resumed = site.launches.get(("forward", "compensated"), 0), site.stabilizers
    session.close()
    return {
        "plain": plain,
        "watched": watched,
        "acted": acted,
        "norms": norms,
        "refusal": refusal,
        "samples": [(s.step, s.site, s.layer, s.indicator, s.values) for s in samples],
        "seen": seen,
        "resumed": resumed,
    }


def rounding(way, mesh):
    """The delta bias of a step in BF16, as GuardBit measures it and by what the calls have shown.

    Of each site of this rank: measured and exact, the sums over rows of dO (O - exact O) and of
    their sizes, of the heads that are here.
    """
    model, seen = Model(way, mesh), {}

    def show(site):
        def hook(core, inputs, out):
            seen[site] = [*(x.detach().double() for x in inputs), out.detach().double()]
            out.register_hook(lambda d_out: seen[site].append(d_out.double()))

        return hook

    for site in ("shared.core", "whole.core"):
        model.get_submodule(site).register_forward_hook(show(site))
    session = MonitorSession(model, every_n_train_steps=1, strict=True)
    session.begin_batch(0)
    with torch.autocast(mesh.device_type, torch.bfloat16):
        loss = loss_of(model, 0)
    loss.backward()
    session.end_step()
    found = {}
    for site, (q, k, v, out, d_out) in seen.items():
        exact = attend(q, k, v, AttentionSpec(SIZE**-0.5, "top-left")).out
        errors = (d_out * (out - exact)).sum(-1)
        measured = {s.indicator: s.values for s in session.samples if s.site == site}
        found[site] = {
            "own": list(session.instrumentation.candidates[site].own_heads),
            "measured": [measured.get(name) for name in ("delta_bias", "delta_bias_abs")],
            "exact": [x.sum((0, 2)).tolist() for x in (errors, errors.abs())],
        }
    session.close()
    return found


def main(folder, accelerator):
    begin(accelerator)
    meshes = init_device_mesh(accelerator, (2, 1), mesh_dim_names=("heads", "one_rank"))

    def seen(path, way):
        mesh = meshes["one_rank" if way == "one_rank" else "heads"]
        with logged() as lines:
            found = train(path, way, mesh)
        return {**found, "lines": lines, "rounding": rounding(way, mesh) if way in ROUNDED else {}}

    keep(folder, WAYS, seen)
