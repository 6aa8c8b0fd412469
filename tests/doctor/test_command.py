"""`guardbit doctor`: what it prints and refuses, and the table of known faults."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
from typer.testing import CliRunner

from guardbit.cli import app
from guardbit.doctor import examine, preflight
from guardbit.doctor.examine import Examination, FaultName
from guardbit.doctor.inputs import KINDS, Shape, dense_spec, packed_spec, parse_shape
from guardbit.doctor.preflight import Examiner, is_within, known_faults
from guardbit.kernels.engines.sdpa import CPUFlash

PAGE = Path(__file__).parents[2] / "docs" / "doctor.md"
SMALL = ("--shape", "1,2,1,24,16", "--mask", "causal")


def invoke(*arguments):
    return CliRunner().invoke(app, ["doctor", *arguments])


def test_json_holds_machine_rows_and_no_finding():
    result = invoke(*SMALL, "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["machine"]["versions"]["torch"]
    assert told["findings"] == [] and told["is_broken"] is False
    assert told["not_examined"] == {} and told["is_complete"] is True
    assert told["chosen"] == {"1,2,1,24,16 causal bf16": "FLASH_ATTENTION"}
    assert {row["engine"] for row in told["rows"]} == {"FLASH_ATTENTION", "MATH"}
    assert {row["tensor"] for row in told["rows"]} == {"out", "lse", "dq", "dk", "dv"}


def test_the_table_ends_with_a_conclusion():
    result = invoke("--shape", "1,2,1,24,8", "--mask", "causal")
    assert result.exit_code == 0
    assert "MATH" in result.stdout
    assert "varlen_attn" not in result.stdout, "it runs on GPUs only"
    assert result.stdout.splitlines()[-1].startswith("Sound: all of the 2 examined")


def test_something_broken_is_exit_code_1_and_a_sentence_with_what_to_do(monkeypatch):
    sound = CPUFlash.backward

    def doubled(self, *arguments):
        found = sound(self, *arguments)
        return found._replace(dk=2 * found.dk)

    monkeypatch.setattr(CPUFlash, "backward", doubled)
    result = invoke("--shape", "1,2,2,80,16", "--mask", "causal")
    assert result.exit_code == 1
    assert "dK is outside the bounds of rounding" in result.stdout
    assert "Turn it off: torch.backends" in result.stdout
    assert result.stdout.splitlines()[-1] == "Broken: FLASH_ATTENTION."


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still; looking at inputs takes `look` seconds, a unit in FP64 `unit`."""
    clock = SimpleNamespace(now=0.0, look=0.0, unit=0.0)
    monkeypatch.setattr(preflight, "time", SimpleNamespace(monotonic=lambda: clock.now))

    def slowed(work, cost):
        def run(*arguments):
            clock.now += getattr(clock, cost)
            return work(*arguments)

        return run

    monkeypatch.setattr(Examination, "look", slowed(Examination.look, "look"))
    monkeypatch.setattr(preflight, "exactly", slowed(preflight.exactly, "unit"))
    return clock


def test_what_was_examined_in_part_is_not_called_sound(clock):
    clock.look = 10.0  # of two engines: the second kind of inputs is the last to begin
    result = invoke(*SMALL, "--seconds", "29")
    assert result.exit_code == 0
    rows = [
        line for line in result.stdout.splitlines() if " 1,2,1,24,16 " in line and "e-03" in line
    ]
    assert len(rows) == 2 and all(row.endswith("  no fault") for row in rows)
    assert result.stdout.splitlines()[-1].startswith("Incomplete: 2 examined")
    assert "Sound:" not in result.stdout

    clock.now = 0.0
    told = json.loads(invoke(*SMALL, "--seconds", "29", "--json").stdout)
    assert (told["is_broken"], told["is_complete"]) == (False, False)
    after = f"1,2,1,24,16 causal, {list(KINDS)[2]} and what follows"
    assert told["not_examined"] == {"not examined: 29 s are over": [after]}
    assert {row["inputs"] for row in told["rows"]} == {*list(KINDS)[:2]}


def test_what_is_broken_in_part_is_broken(clock, monkeypatch):
    monkeypatch.setattr(CPUFlash, "backward", lambda *arguments: 1 / 0)
    clock.look = 10.0
    result = invoke(*SMALL, "--seconds", "15")
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1] == "Broken: FLASH_ATTENTION."


def test_units_of_the_first_inputs_do_not_take_the_time_of_the_others(clock):
    clock.look, clock.unit = 1.5, 1.0  # FP64 alone would take 96 seconds for each of seven inputs
    examiner = Examiner("cpu", seconds=90, all_units=True)
    examiner.shape(parse_shape("8,12,12,8,8"), "causal", "bf16")
    assert examiner.result.not_examined == {}
    assert len({row.inputs for row in examiner.result.rows}) == 7


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--shape", "1,2,3"), "shape is '1,2,3'; it must be five whole numbers"),
        (("--shape", "1,3,2,8,8"), "with H a multiple of H_kv"),
        (("--mask", "window"), "it must have at least 1 key"),
        (("--mask", "triangle"), "mask is 'triangle'; allowed are full, causal"),
        (("--dtype", "fp8"), "dtype is 'fp8'; allowed are bf16, fp16"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(arguments, sentence):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert sentence in result.stderr and result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("seconds", "shape", "mask", "why", "needed"),
    [
        (0, "1,1,1,8,8", "causal", "not examined: 0 s are over", ""),
        # 24 tensors of 2^24 BF16; 4 bytes a score, of each head only where a mask adds to it.
        (60, "1,8,2,65536,32", "causal", "half of the free memory, 1.0 GiB", ", 16.8 GiB"),
        (60, "1,8,2,65536,32", "additive", "half of the free memory, 1.0 GiB", ", 128.8 GiB"),
    ],
)
def test_what_time_and_memory_do_not_allow_is_said(seconds, shape, mask, why, needed, monkeypatch):
    monkeypatch.setattr(preflight, "free_memory", lambda _: 2**31)
    examiner = Examiner("cpu", seconds)
    examiner.shape(parse_shape(shape), mask, "bf16")
    found, place = examiner.result, f"{shape} {mask} bf16"
    ((said, (where,)),) = found.not_examined.items()
    assert why in said and where == place + needed
    assert found.examined == 0 and not found.as_json()["is_complete"]


def test_what_memory_does_not_allow_to_compare_is_not_sound(monkeypatch):
    def runs_out(*arguments):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(examine, "gaps", runs_out)
    result = invoke(*SMALL)
    assert "not examined: out of memory" in result.stdout
    assert "Sound" not in result.stdout


def test_ranges_of_versions():
    assert is_within("2.11.0+cu128", ">=2.11,<2.12")
    assert is_within("2.5", "==2.5.0")
    assert not is_within("9.26.0", "<9.26")
    assert is_within("4.0.0b9", "<4.0.0b10") and not is_within("4.0.0b10", "<4.0.0b10")
    assert is_within("4.0.0b36", "<4.0.0")
    for fault in known_faults():
        assert all(is_within("2.5", wanted) in (True, False) for wanted in fault.versions.values())


def test_known_faults_concern_the_machines_that_they_name():
    faults = known_faults()
    assert all(fault.source.startswith("https://") and fault.advice for fault in faults)
    nan = next(fault for fault in faults if "196678" in fault.source)
    machine = {"torch": "2.13.0+cu130", "cudnn": "9.20.0"}
    assert nan.concerns(machine, "9.0")
    assert not nan.concerns(machine, "8.0")
    assert not nan.concerns(machine, None)
    assert not nan.concerns({**machine, "cudnn": "9.26.0"}, "9.0")
    assert not nan.concerns({"torch": "2.13.0"}, "9.0")


def known_rows():
    yield "| engine | versions | on which calls | what comes out |"
    yield "|---|---|---|---|"
    for fault in known_faults():
        where = ", ".join(f"{name} {wanted}" for name, wanted in fault.versions.items())
        if fault.capability:
            where += f"; compute capability {', '.join(fault.capability)}"
        yield (
            f"| {fault.engine} | {where} | {fault.when} | {fault.what} ([source]({fault.source})) |"
        )


def test_the_page_has_the_table_of_known_faults():
    expected = "\n".join(known_rows())
    assert expected in PAGE.read_text(encoding="utf-8"), f"the table is:\n{expected}"


def test_the_page_has_every_finding():
    table = PAGE.read_text(encoding="utf-8").partition("| finding |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| (`.*?`) \|", table, re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted(get_args(FaultName))


def test_a_window_shows_as_many_keys_and_at_most_the_whole_sequence():
    shape = Shape(1, 1, 1, 8, 4)
    for window in (1, 8, 9, 2**31, 2**63, 10**30):
        mask = f"window:{window}"
        dense = dense_spec(shape, mask, torch.bfloat16, "cpu").mask
        shown = torch.ones(8, 8).tril().triu(1 - min(window, 8)).bool()
        assert dense is not None and torch.equal(dense[0, 0], shown)
        packed = packed_spec(shape, mask, "cpu")
        assert packed is not None and packed[0].window == (min(window, 8) - 1, 0)
