"""Is attention sound on this machine, at these shapes? `guardbit doctor` and the preflight.

Every engine that could serve a call is run on inputs as drawn and on those that kernels have failed
on, and compared with FP64, forward and gradients, within bounds that follow from its arithmetic
(`exact`). What is outside, and a bias within, is named (`faults`, `examination`).
"""
