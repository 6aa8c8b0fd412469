"""GuardBit watches every attention head of a low-precision training run."""
