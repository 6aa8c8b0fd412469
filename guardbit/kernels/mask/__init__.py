"""Which keys a query sees: the geometry of masks, for whole tensors, in plain torch.

`guardbit.kernels.device.masks` has it for the tiles of the Triton kernels. The two are apart
because plain torch must work where Triton cannot be imported.

Causal, drawn for N = 2, M = 4, x for seen::

    True: x x x .    "top-left": x . . .
          x x x x                x x . .

Query n sees keys up to n + shift, `geometry.causal_shift`. A window has its middle where
`causal=True` ends, and documents have all this within each; whatever is asked for, the keys that a
query sees are one interval, `geometry.visible_range`. A window of (1, 1), and two documents of two
queries and two keys each:

    x x . .    x x . .
    x x x .    x x . .
    . x x x    . . x x
    . . x x    . . x x

Dense masks, boolean or additive, hold one entry for each query and key, and broadcast over any
axis; a key is seen if the interval and the mask allow it.
"""
