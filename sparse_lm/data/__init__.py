"""Takes text in and gives batches of token windows out.

Text is prepared by `builder`, in tasks that `workers` run: corpus (documents), holdout (two parts), tokenizer, packing
(windows). `opening` opens what is prepared, a `dataset`, and `pipeline` makes batches of it.
"""
