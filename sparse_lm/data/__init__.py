"""Text in, batches of token windows out.

`open_data(config)` gives a `Data`; `train_batches` and `heldout_batches` read it. Building the
data: corpus (documents) -> holdout (two parts) -> tokenizer -> packing (windows) -> builder (TFDS
files), as stages of tasks on several processes, whose results a workspace keeps. Reading it:
opening -> dataset -> pipeline.
"""

from sparse_lm.data.dataset import Data
from sparse_lm.data.errors import DataError
from sparse_lm.data.opening import open_data
from sparse_lm.data.pipeline import heldout_batches, train_batches

__all__ = ["Data", "DataError", "heldout_batches", "open_data", "train_batches"]
