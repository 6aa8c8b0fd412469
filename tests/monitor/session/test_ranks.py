"""Two ranks judge the same samples, and survive an error of one."""

import json
import textwrap

import pytest
import torch

from tests.callbacks.several_ranks import launch
from tests.monitor.session.plain_loop import LOUD, SITES, events_of, model_of, sampled, values

WORKER = textwrap.dedent(
    """
    import json, os, sys
    import torch

    from guardbit.kernels import dispatch
    from guardbit.monitor.measure import measurement, weights
    from guardbit.monitor.policy import Policy
    from tests.monitor.session.plain_loop import Loop, LoudRow, fail

    rank, (folder, module, function) = int(os.environ["RANK"]), sys.argv[1:]
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2
    )
    loop = Loop(
        rules=(LoudRow(),),
        policy=Policy("compensated", scope="head"),
        dirpath=f"{folder}/run" if rank == 0 else None,
    )
    for step in range(5):
        if rank == 1 and step == 2:
            setattr({"dispatch": dispatch, "measurement": measurement}[module], function, fail)
        if rank == 1 and step == 3:
            weights.spectral_norms = fail
        with loop.session.step(step) as record:
            # Only rank 1 sees the loud rows.
            x = torch.full((1 + rank, 12, 32), 0.1) * (1 + 9 * rank)
            x = x + 0.01 * torch.arange(12)[:, None]
            loss = loop.model(x.bfloat16()).float().square().mean()
            loss.backward()
            record.loss(float(rank))
    stabilizers = loop.session.instrumentation.stabilizers()
    detectors = loop.session.state_dict()["detectors"]
    loop.session.close()
    with open(f"{folder}/{rank}.json", "w") as file:
        json.dump([stabilizers, sorted(loop.session.stages_off), detectors], file)
    torch.distributed.destroy_process_group()
    """
)


@pytest.mark.parametrize(
    "broken",
    [("dispatch", "delta_bias"), ("measurement", "_rows")],
    ids=["in a call", "as it is added up"],
)
def test_two_ranks_judge_the_same_samples_and_survive_an_error_of_one(tmp_path, broken):
    (tmp_path / "worker.py").write_text(WORKER)
    launch(tmp_path / "worker.py", 2, tmp_path, *broken)
    zero, one = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert zero[0] == one[0] == {SITES[0]: ["none"] * 2, SITES[1]: ["compensated"] + ["none"] * 3}
    assert zero[1] == one[1] == ["capture", "metrics"]
    errors = events_of(tmp_path / "run", "monitor_error")[["step", "why"]].to_numpy().tolist()
    elsewhere = "the stage failed on another rank"
    assert errors == [[2, f"capture: {elsewhere}"], [4, f"metrics: {elsewhere}"]]
    assert zero[2] == one[2], "the losses too, of which each rank has its own"
    assert values(tmp_path / "run", "loss") == dict.fromkeys(range(5), 0.0), "rank 0's"
    # Where one rank cannot measure, as at step 2, none does, and nobody waits for it for ever.
    assert sampled(tmp_path / "run") == [0, 1]
    assert sorted(values(tmp_path / "run", "w_q_spectral_norm", SITES[0])) == [0, 1, 2, 3]
    # Rank 0 alone would have seen nothing loud.
    with torch.no_grad():
        x = 0.1 + 0.01 * torch.arange(12)[:, None].expand(1, 12, 32)
        torch.manual_seed(0)
        layer = model_of().bfloat16().layers[0]
        q, k = (
            p(x.bfloat16()).float().unflatten(-1, (2, 16)) for p in (layer.q_proj, layer.k_proj)
        )
        largest = (torch.einsum("bnhd,bmhd->bhnm", q, k) / 4).max().item()
    assert largest < LOUD / 10
    assert events_of(tmp_path / "run", "switch").step.tolist() == [0]
