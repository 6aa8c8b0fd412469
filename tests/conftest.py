"""Without a GPU the Triton kernels run in Triton's interpreter.

It is chosen when triton is first imported, by whatever test comes first, so it is chosen here.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
