"""What goes wrong with data, said in one line."""


class DataError(ValueError):
    """Text, a tokenizer or prepared data that cannot be used. The message names the file and the reason."""
