"""Functions of libraries: whether they keep their bits, and what a switch does to them."""

import pytest

import guardbit
from guardbit.monitor.interception.entry_points import ENTRY_POINTS
from tests.monitor.entry_points.library_models import LIBRARY, build, install

#: They need a GPU, or are not installed where the tests run.
STAND_IN = "a stand-in only"
CACHED = [entry for entry in ENTRY_POINTS if entry.attribute.endswith("_with_kvcache")]


@pytest.fixture(autouse=True)
def libraries(monkeypatch):
    _, take_back = install(monkeypatch)
    yield
    take_back()


@pytest.mark.parametrize("entry", LIBRARY, ids=lambda entry: entry.name)
def test_function(entry, tiny, report):
    model, x = build(entry)
    before = tiny.step(model, x)
    inst = guardbit.instrument(model)
    try:
        assert tiny.equal(tiny.step(model, x), before)
        site = inst.sites["0"]
        assert (site.entry, site.unwatched) == (entry.name, None)
        worked = []
        for name in ("exact_delta", "centered_keys"):
            inst.switch("0", name)
            tiny.step(model, x)
            if inst.stabilizers()["0"] == [name] * 4:
                worked.append(name)
    finally:
        inst.remove()
    assert worked == ["exact_delta", "centered_keys"]
    by = f"yes, by {' and '.join(worked)}"
    against = STAND_IN if "flash_attn" in entry.name else "a stand-in for its kernels"
    # Compiled calls of the hub's are refused: tests/monitor/entry_points/test_hub.py.
    watched = "yes, in eager calls" if entry.is_of_hub else "yes"
    report("Functions of libraries", f"`{entry.name}`", watched, by, against)


@pytest.mark.parametrize("entry", CACHED, ids=lambda entry: entry.name)
def test_inference(entry, report):
    why = entry.bind().why
    report("Functions of libraries", f"`{entry.name}`", f"no: {why}", "no", STAND_IN)


def test_the_table_has_a_row_for_each(committed):
    rows = committed["Functions of libraries"]
    names = [f"`{entry.name}`" for entry in (*LIBRARY, *CACHED)]
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows] == names
