"""Which keys a query sees: the geometry of masks, for whole tensors, in plain torch.

`guardbit.kernels.device.masks` does the same for the tiles of the Triton kernels. The two are
separate because plain torch must work where Triton cannot be imported.

Causal, drawn for N = 2, M = 4, x for seen::

    True: x x x .    "top-left": x . . .
          x x x x                x x . .

Query n sees keys up to n + shift, `geometry.causal_shift`. A window is centred on the last key that
`causal=True` would show. Within documents, all of this holds for each document. In every case the
keys that a query sees are one interval, `geometry.visible_range`. On the left a window of (1, 1),
on the right two documents of two queries and two keys each:

    x x . .    x x . .
    x x x .    x x . .
    . x x x    . . x x
    . . x x    . . x x

Dense masks, boolean or additive, hold one entry for each query and key, and broadcast over any
axis; a key is seen if the interval and the mask allow it.
"""
