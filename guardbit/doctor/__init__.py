"""Is attention sound on this machine, and why does a head diverge? `guardbit doctor | diagnose`.

Every engine that could serve a call is run on random inputs and on inputs that kernels have failed
on, and compared with FP64, forward and gradients, within bounds that follow from its arithmetic
(`exact`). What is outside, and a bias within, is named (`examine`).

After an alarm, appendix F of arXiv 2510.04212 is carried out on a few heads of sampled steps: how
the kernel rounds (`recognition`), which rounding moves dQ, whether that adds up, and what remedies
leave (`diagnose`).
"""
