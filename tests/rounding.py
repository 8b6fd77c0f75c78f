"""How far two right computations in float32 may be apart, whatever the processor.

Kernels for SSE, AVX2 and AVX-512, and one thread or two, add up in orders of their own. Each bound
is ten times the most that any of them was seen to differ by (`ATEN_CPU_CAPABILITY`,
`MKL_ENABLE_INSTRUCTIONS` and `ONEDNN_MAX_CPU_ISA` choose them). Faults lie far above it.
"""

VALUES = 1e-5
"""Sums of some hundred numbers of order 1; seen 9.6e-7."""

STEPS = 2e-5
"""Losses, norms and other metrics of optimizer steps, relative and absolute; seen 1.3e-6."""

GRADIENTS = 5e-5
"""Gradients and log-probabilities behind several layers; seen 5.0e-6."""

MOMENTS = 4e-4
"""Weights and moments after some steps of AdamW, which enlarges a small gradient; seen 3.5e-5."""
