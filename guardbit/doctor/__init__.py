"""Is attention sound on this machine, and why does a head diverge? `guardbit doctor | diagnose`.

Engines are run on `inputs` and compared with FP64 (`exact`, `examine`). A diagnosis finds how the
kernel rounds (`recognition`), and what that does to dQ and W_Q (`diagnose`).
"""
