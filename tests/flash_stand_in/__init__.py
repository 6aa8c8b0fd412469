"""Flash attention in plain torch on the CPU, for libraries that have kernels for GPUs only.

It rounds where their kernels round: O to the format of q, and dS before it is multiplied. Its
backward computes delta = rowsum(dO * O) from the O that it is handed, as theirs do. Written apart
from GuardBit's own references.

`install` puts it under the ops that PyTorch's `varlen_attn` calls, and makes modules like those of
flash_attn 2, 3 and 4 of it, with the parameters that these have, modules like those that the
package `kernels` makes of kernels of Hugging Face's hub, and TransformerEngine's.
"""

import sys
import types
from importlib.machinery import ModuleSpec

import torch

from tests.flash_stand_in import transformer_engine
from tests.flash_stand_in import version_2 as v2
from tests.flash_stand_in import versions_3_and_4 as v3
from tests.flash_stand_in.aten import aten_kernels


def is_of(engine):
    """Whether it stands in for an engine, by its name."""
    return engine == "varlen_attn" or "flash_attn" in engine


def modules():
    """Name -> module, of all three and of their kernels in the hub."""
    ops = getattr(torch.ops, v2.NAMESPACE)
    kinds = ("", "qkvpacked_", "kvpacked_", "varlen_", "varlen_qkvpacked_", "varlen_kvpacked_")
    names = [*(f"flash_attn_{kind}func" for kind in kinds), "flash_attn_with_kvcache"]
    public_2 = {name: getattr(v2, name) for name in names}
    private_2 = {
        "_wrapped_flash_attn_forward": ops._flash_attn_forward,
        "_wrapped_flash_attn_backward": ops._flash_attn_backward,
        "_wrapped_flash_attn_varlen_forward": ops._flash_attn_varlen_forward,
        "_wrapped_flash_attn_varlen_backward": ops._flash_attn_varlen_backward,
    }
    public_4 = {"flash_attn_func": v3.func_4, "flash_attn_varlen_func": v3.varlen_func_4}
    contents = {
        "flash_attn": {**public_2, "__version__": "2.8.4"},
        "flash_attn.flash_attn_interface": {**public_2, **private_2},
        "flash_attn.bert_padding": {"pad_input": v2.pad_input, "unpad_input": None},
        "flash_attn_interface": {
            "flash_attn_func": v3.func_3,
            "flash_attn_varlen_func": v3.varlen_func_3,
            "flash_attn_qkvpacked_func": v3.qkvpacked_func_3,
            "flash_attn_with_kvcache": v2.flash_attn_with_kvcache,
            "_flash_attn_forward": v3.forward_3,
            "_flash_attn_backward": v3.backward_3,
        },
        "flash_attn.cute": public_4,
        "flash_attn.cute.interface": {
            **public_4, "_flash_attn_fwd": v3.forward_4, "_flash_attn_bwd": v3.backward_4
        },
        **transformer_engine.contents(v2.flash_attn_func),
    }  # fmt: skip
    hub_2, hub_3, hub_4 = (
        {name: _copy(x) for name, x in public.items()}
        for public in (public_2, contents["flash_attn_interface"], public_4)
    )
    contents |= {
        "flash_attn2_0f3a": hub_2,
        "flash_attn2_0f3a.flash_attn_interface": {
            **hub_2, **{name.removeprefix("_wrapped"): x for name, x in private_2.items()}
        },
        "flash_attn3_77c1": hub_3,
        "flash_attn3_77c1.flash_attn_interface": hub_3,
        "flash_attn4_9e02": hub_4,
        "flash_attn4_9e02.interface": {
            **hub_4, "_flash_attn_fwd": v3.forward_4, "_flash_attn_bwd": v3.backward_4
        },
    }  # fmt: skip
    made = {}
    for name, content in contents.items():
        made[name] = types.ModuleType(name)
        made[name].__path__ = []
        made[name].__spec__ = ModuleSpec(name, None, is_package=True)
        vars(made[name]).update(content)
    for name in ("flash_attn.flash_attn_interface", "flash_attn_interface"):
        for function in contents[name].values():
            function.__module__ = name  # as of functions that are written there
    for function in public_4.values():
        function.__module__ = "flash_attn.cute.interface"
    return made


def _copy(function):
    """Another function that does the same, as a kernel of the hub has."""
    made = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def install(monkeypatch):
    """Puts all of it in its places for a test; returns what takes the kernels back."""
    for name, module in modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    return aten_kernels()
