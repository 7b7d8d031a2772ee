"""Slow, simple float64 references for all computations of the engine.

Nothing here imports shoal: a test builds the same run twice, once on each side, and compares.

optimizers  one class per update rule, straight from its paper
others      rules of other systems that resemble those of shoal and differ
checkpoint  the checkpoint format, read slowly from its document
table       a table as a dict: dedupe, initial rows, zero and non-finite gradients
hashing     mix and unmix on Python's integers; keys that meet in one slot or one place
sketches    count-min sketches on Python's integers
initial     the rows that unseen keys read
rounding    the grids of float16 and bfloat16
text        lines of every format by split, regular expressions and fractions, and where a line is malformed
metrics     AUC pair by pair, GAUC group by group, the weighted means
"""
