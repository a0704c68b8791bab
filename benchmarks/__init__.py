"""Time, memory and error of the fused linear losses beside their peers, one table a case: ``python -m benchmarks``.

cases            what is computed: heads, shapes, workloads (a loss of log-probabilities), random inputs
implementations  who computes it: the peers, one table row each; `ours` has the rows of this library
oracle           the true loss and gradients in float64, and the relative errors against them
measure          one case: correctness gate, peak memory, matrix-product floor, interleaved timing
results          environment, JSON, tables
profiling        where one DPO step spends its time, and whether anything in it waits for the device

A new loss is one entry of `cases.WORKLOADS`, its rows of `cases.SHAPES`, and one entry of `ours.FUSED`; a new
implementation is one row of `implementations.PEERS`.
"""
