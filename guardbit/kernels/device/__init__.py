"""The code that runs on the GPU: Triton kernels and what they share. Launchers stand beside.

Shapes of tensors are those of `guardbit.kernels.reference`.
"""
