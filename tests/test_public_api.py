"""The names users rely on. A change here is a change of the interface."""

import importlib
import inspect
import sys

import pytest

import guardbit

#: Parameters in their order; those after "*" by name only.
PARAMETERS = {
    "AttentionMonitor": "every_n_train_steps=50, *, image_every_n_samples=None, log_layers=False,"
    " sites=None, indicators=None, num_rows=None, num_audited_heads=1, rules, dirpath=None,"
    " snapshot_megabytes=64, locate_nonfinite=False, audit_modules=False, on_alarm=None,"
    " strict=False",
    "AutoStabilizer": "stabilizer=None, *, dry_run=False, scope='layer', always=False,"
    " escalate=True, quiet_steps=None, qk_clip=None, on_nonfinite='keep'",
    "HuggingFaceMonitor": "every_n_train_steps=50, *, sites=None, indicators=None, num_rows=None,"
    " num_audited_heads=1, rules, policy=None, dry_run=False, dirpath=None,"
    " snapshot_megabytes=64, locate_nonfinite=False, audit_modules=False, on_alarm=None,"
    " strict=False",
    "MonitorSession": "model, *, writer=None, every_n_train_steps=50, sites=None, indicators=None,"
    " num_rows=None, num_audited_heads=1, rules, policy=None, dry_run=False, dirpath=None,"
    " snapshot_megabytes=64, locate_nonfinite=False, audit_modules=False, on_alarm=None,"
    " strict=False",
    "Policy": "stabilizer=None, *, scope='layer', always=False,"
    " escalate=True, quiet_steps=None, qk_clip=None, on_nonfinite='keep'",
    "flash_attention": "q, k, v, *, causal=False, scale=None, stabilizer='none', beta=2.0,"
    " eps=0.001, seed=0, backend='auto', return_lse=False, dropout_p=0.0",
    "instrument": "model, sites=None",
    "load": "path",
    "locate_nonfinite": "model, function",
    "observe": "q, k, v, *, causal=False, scale=None, mask=None",
    "read_events": "path",
    "read_metadata": "path",
    "read_run": "path",
}

#: Methods, properties and attributes of the objects users hold.
MEMBERS = {
    "Instrumentation": ["load_stabilizers", "remove", "sites", "stabilizers", "switch"],
    "Site": ["key_weights", "launches", "limits", "num_heads", "query_weight", "query_weights"],
    "MonitorSession": [
        "abandon_step",
        "alarmed_heads",
        "audit",
        "begin_batch",
        "catch_up",
        "close",
        "coverage",
        "end_step",
        "grad_norm",
        "is_sampled",
        "load_state_dict",
        "loss",
        "judgement",
        "modules",
        "num_alarmed_heads",
        "record",
        "skips_step",
        "snapshot",
        "stages_off",
        "state_dict",
        "step",
        "switch",
        "validation_loss",
    ],
    "Policy": ["decide", "is_due", "load_state_dict", "remedy", "state_dict", "was_refused"],
}

NAMES = sorted({*PARAMETERS, *MEMBERS, "INDICATORS", "LayoutUnavailable", "STABILIZERS"})
#: What GuardBit's own callbacks call besides.
INTERNAL = {"always", "attempt", "nonfinite", "warn_no_replay"}


def test_the_public_names_are_these():
    assert sorted(guardbit.__all__) == dir(guardbit) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_name_can_be_imported_and_says_what_it_is(name):
    value = getattr(importlib.import_module("guardbit"), name)
    assert isinstance(value, tuple) or inspect.getdoc(value)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'guardbit' has no attribute 'atention'"):
        guardbit.atention  # noqa: B018


def test_a_name_whose_package_is_missing_says_what_to_install(monkeypatch):
    monkeypatch.delitem(sys.modules, "guardbit.callbacks.huggingface", raising=False)
    for module in [name for name in sys.modules if name.startswith("transformers.")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModuleNotFoundError, match=r"HuggingFaceMonitor needs transformers: pip"):
        guardbit.HuggingFaceMonitor  # noqa: B018


def test_the_indicators_and_stabilizers_are_these():
    assert guardbit.INDICATORS == (
        "w_q_spectral_norm",
        "w_k_spectral_norm",
        "qk_spectral_norm",
        "multiple_maxima",
        "multiple_maxima_bf16",
        "max_logit",
        "attention_entropy",
        "key_common_mode",
        "delta_bias",
        "delta_bias_abs",
        "delta_bias_cumulative",
        "dq_relative_error",
        "dq_coherent_error",
        "rounding_share",
        "rounding_share_low",
        "rounding_share_high",
        "loss",
        "grad_norm",
    )
    assert guardbit.STABILIZERS == (
        "none", "exact_delta", "centered_keys", "compensated", "row_max",
    )  # fmt: skip


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_parameters_are_these(name):
    parts, by_name = [], False
    for parameter in inspect.signature(getattr(guardbit, name)).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not by_name:
            by_name = True
            parts.append("*")
        plain = parameter.name == "rules" or parameter.default is parameter.empty
        parts.append(parameter.name if plain else f"{parameter.name}={parameter.default!r}")
    assert ", ".join(parts) == PARAMETERS[name]


@pytest.mark.parametrize("name", MEMBERS)
def test_the_members_are_there_and_documented(name):
    kind = getattr(guardbit, name)
    for member in MEMBERS[name]:
        assert inspect.getdoc(inspect.getattr_static(kind, member)), f"{name}.{member}"


@pytest.mark.parametrize("name", ["MonitorSession", "Policy"])
def test_there_are_no_other_members(name):
    public = {member for member in dir(getattr(guardbit, name)) if not member.startswith("_")}
    assert public - INTERNAL == set(MEMBERS[name])
