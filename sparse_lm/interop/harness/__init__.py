"""Models in EleutherAI's evaluation harness, lm-eval.

Only adapter.py and tasks.py import the harness, which is not installed everywhere: `sparse_lm.evaluate` imports them
when it is given tasks.
"""
