"""Why does this head diverge? `guardbit diagnose`, after the alarm.

Appendix F of arXiv 2510.04212 carried out on a few heads of one sampled step: which operation of
flash attention moves dQ (`recognition`, `isolation`), whether what it moves adds up (`direction`),
which rows, keys and columns of V it comes from (`roots`), and what remedies leave (`remedies`).
"""
