"""Takes text in and gives batches of token windows out.

`open_data(config)` gives a `Data`; `train_batches` and `heldout_batches` read it. Text is prepared by `builder`, in
`stages` of tasks that `workers` run: corpus (documents), holdout (two parts), tokenizer. What is prepared is read by
opening, dataset and pipeline.
"""

from sparse_lm.data.dataset import Data
from sparse_lm.data.errors import DataError
from sparse_lm.data.opening import open_data
from sparse_lm.data.pipeline import drawn_shares, heldout_batches, train_batches

__all__ = ["Data", "DataError", "drawn_shares", "heldout_batches", "open_data", "train_batches"]
