"""Makes Triton's interpreter fast enough for tests; what it computes stays as it is.

Each operation on a tile is one call of NumPy, and a hundred of Python around it. These leave out
what is computed and dropped, and remember what only depends on a shape or a dtype. Triton 3.6 is
also given what later versions compute as GPUs do, and it does not.
"""

import numpy as np
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

PATCHED_MODULES = set()
BLOCKS, SHAPES, NUMPY_DTYPES = {}, {}, {}

new_block_type = core.block_type.__init__
find_numpy_dtype = interpreter._get_np_dtype
any_to_tensor = TritonSemantic.to_tensor


def call(self, *args, **kwargs):
    """Calls a device function; Triton's own way takes two thirds of the tests' time.

    Triton goes through all of `triton.language` at every such call and puts the interpreter's
    functions there. They are there already: of `tl` since the launch, and of what Triton's own
    device functions use since the first call of one of their module.
    """
    if self.fn.__module__ not in PATCHED_MODULES:
        PATCHED_MODULES.add(self.fn.__module__)
        interpreter._patch_lang(self.fn)
    function = self.rewrite()
    try:
        return function(*args, **kwargs)
    except Exception as error:
        raise interpreter.InterpreterError(repr(error)) from error


def check_no_overflow(self, lhs, rhs, binary_op):
    """Does nothing: Triton computes the check in INT64 and asserts it only where it debugs."""
    assert not self.builder.options.debug


def block_type(self, element_ty, shape):
    """Makes the type of a tile, each shape checked and named once."""
    key = element_ty.name, tuple(s.value if type(s) is core.constexpr else s for s in shape)
    if key in BLOCKS:
        self.element_ty = element_ty
        self.shape, self.numel, self.name = BLOCKS[key]
    else:
        new_block_type(self, element_ty, shape)
        BLOCKS[key] = self.shape, self.numel, self.name


def tensor(self, handle, type):
    """Makes a tile, its shape as constants made once."""
    sizes = tuple(type.shape) if type.is_block() else ()
    if sizes not in SHAPES:
        count = 1
        for size in sizes:
            count *= size
        SHAPES[sizes] = core.tuple([core.constexpr(s) for s in sizes]), core.constexpr(count)
    self.shape, self.numel = SHAPES[sizes]
    self.handle, self.type, self.dtype = handle, type, type.scalar


def numpy_dtype(dtype):
    """Looks a dtype up, without building a table each time."""
    name = dtype.name
    if name not in NUMPY_DTYPES:
        NUMPY_DTYPES[name] = find_numpy_dtype(dtype)
    return NUMPY_DTYPES[name]


def get_bf16(self, value):
    """Makes a constant of BF16; Triton 3.6 has it for GPUs only."""
    return self.create_fp_trunc(self.get_fp32(value), core.bfloat16)


def create_fma(self, x, y, z):
    """Multiplies and adds with one rounding, as GPUs do; Triton 3.6 rounds the product too.

    Exact but for FP64's rounding of the sum, before that to FP32.
    """
    total = np.add(np.multiply(x.data, y.data, dtype=np.float64), z.data, dtype=np.float64)
    return interpreter.TensorHandle(total.astype(numpy_dtype(z.dtype.scalar)), z.dtype.scalar)


def to_tensor(self, x, check_type=True):
    """Makes an FP32 of a float, as GPUs get it; Triton 3.6 makes an FP64 of one near 0."""
    if isinstance(x, float):
        return self.scalar_constant(x, dtype=core.float32)
    return any_to_tensor(self, x, check_type)


def make_fast():
    interpreter.InterpretedFunction.__call__ = call
    TritonSemantic.binary_op_sanitize_overflow_impl = check_no_overflow
    core.block_type.__init__ = block_type
    core.tensor.__init__ = tensor
    interpreter._get_np_dtype = numpy_dtype
    if not hasattr(interpreter.InterpreterBuilder, "get_bf16"):  # Triton 3.6
        interpreter.InterpreterBuilder.get_bf16 = get_bf16
        interpreter.InterpreterBuilder.create_fma = create_fma
        TritonSemantic.to_tensor = to_tensor
