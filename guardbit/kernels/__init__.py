"""Attention and its corrections: the op, the engines, the Triton kernels and their reference."""
